"""Long tensors of an accelerator in host memory: in rounds, by the relay's buffers.

A copy of a whole one would be in memory that is not page-locked, which is scarce: copies to and
from that are several times slower, and block. In rounds, one part is copied while MPI moves others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives.staging import (
    MAX_PINNED_BYTES,
    contiguous,
    from_host,
    to_host,
)
from kaitian_mpi.distributed.relay.chunking import longest_chunk
from kaitian_mpi.mpi import pairwise

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.relay.relay import Relay
    from kaitian_mpi.mpi.datatypes import Reduction

Tensors = Sequence[torch.Tensor]

LONG_BYTES = MAX_PINNED_BYTES
"""Gathers of more go in rounds on all ranks, if one has an accelerator."""

_ROUND_BYTES = 8 << 20  # of all ranks' pieces, what is copied at once
_LEAST_CUT_BYTES = 64 << 10  # of a message


def reduce_scatter_in_rounds(
    comm: MPI.Comm, relay: Relay | None, output: torch.Tensor, pieces: Tensors, op: Reduction
) -> bool:
    """Reduce `pieces[r]` into `output` on rank r if these are long and on a device.

    Returns whether they were. Other ranks may reduce theirs at once. Collective.
    """
    longest, size = max(piece.numel() for piece in pieces), output.element_size()
    is_short = comm.size * longest * size <= 2 * _ROUND_BYTES
    if relay is None or is_short or any(tensor.is_cpu for tensor in (output, *pieces)):
        return False
    dense = contiguous(output)
    result, parts = dense.view(-1), [contiguous(piece).view(-1) for piece in pieces]
    least = pairwise.elements_per_piece(comm, output)
    most = min(_ROUND_BYTES, longest_chunk(relay.settings.memory_mb)) // size
    step = least * max(1, most // ((comm.size + 1) * least))
    rounds = [
        ([part[start : start + step] for part in parts], [result[start : start + step]])
        for start in range(0, longest, step)
    ]

    def exchange(sent: Tensors, received: Tensors) -> None:
        pairwise.reduce_scatter(comm, received[0], sent, op)

    relay.exchange_in_rounds(rounds, exchange)
    from_host(dense, output)
    return True


def all_gather_in_rounds(
    comm: MPI.Comm, relay: Relay, pieces: Tensors, tensor: torch.Tensor
) -> None:
    """Gather every rank's tensor into `pieces`; the ranks' rounds are alike. Collective."""
    others = [piece for rank, piece in enumerate(pieces) if rank != comm.rank]
    is_mixed = len({each.device for each in (tensor, *pieces)}) > 1
    copy = to_host if is_mixed else contiguous
    own, dense = copy(tensor).view(-1), [copy(piece) for piece in others]
    flat = [each.view(-1) for each in dense]
    step = max(_LEAST_CUT_BYTES, _ROUND_BYTES // comm.size) // tensor.element_size()
    rounds = [
        ([own[start : start + step]], [each[start : start + step] for each in flat])
        for start in range(0, max(piece.numel() for piece in pieces), step)
    ]

    def exchange(sent: Tensors, received: Tensors) -> None:
        targets: list[torch.Tensor | None] = [*received]
        targets.insert(comm.rank, None)
        pairwise.exchange(comm, [*sent] * comm.size, targets)

    relay.exchange_in_rounds(rounds, exchange)
    for given, piece in zip(dense, others, strict=True):
        from_host(given, piece)
    target = pieces[comm.rank].detach()
    if target.data_ptr() != tensor.data_ptr():
        target.copy_(tensor.detach().view(target.shape))
