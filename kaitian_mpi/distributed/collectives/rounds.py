"""Long tensors of an accelerator in host memory: in rounds, by the relay's buffers.

A copy of a whole one would be in memory that is not page-locked, which is scarce: copies to and
from that are several times slower, and block. In rounds, one part is copied while MPI moves others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives.staging import contiguous, from_host, to_host
from kaitian_mpi.distributed.relay.chunking import longest_chunk
from kaitian_mpi.mpi import pairwise

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.relay.relay import Relay
    from kaitian_mpi.mpi.datatypes import Reduction

Tensors = Sequence[torch.Tensor]

_ROUND_BYTES = 8 << 20  # of all ranks' pieces, what is copied at once
_LEAST_CUT_BYTES = 64 << 10  # of a message


def in_rounds(
    comm: MPI.Comm,
    relay: Relay,
    tensor: torch.Tensor,
    exchange: Callable[[torch.Tensor], None],
    *,
    reads: bool,
    writes: bool,
) -> None:
    """Apply `exchange` to parts of a tensor in host memory, the same on every rank. Collective.

    Parts that it `reads` are copied out, and those that it `writes` are copied back.
    """
    dense = contiguous(tensor)
    rounds = [
        ([part] if reads else [], [part] if writes else [])
        for part in relay.split(comm, dense.view(-1))
    ]
    relay.exchange_in_rounds(rounds, lambda sent, received: exchange([*sent, *received][0]))
    if writes:
        from_host(dense, tensor)


def exchange_in_rounds(
    comm: MPI.Comm,
    relay: Relay,
    sent: Sequence[torch.Tensor | None],
    received: Sequence[torch.Tensor | None],
) -> None:
    """Send `sent[r]` to rank r and receive `received[r]` from it, as `pairwise.exchange` does.

    In parts of so many bytes that only a message's length counts: of two ranks, both know in which
    rounds there is one. Collective.
    """
    pieces = [piece for piece in (*sent, *received) if piece is not None]
    is_mixed = len({piece.device for piece in pieces}) > 1
    copies = {
        id(piece): to_host(piece) if is_mixed else contiguous(piece)
        for piece in sent
        if piece is not None
    }
    dense = [
        None if piece is None else to_host(piece, read=False) if is_mixed else contiguous(piece)
        for piece in received
    ]
    by_rank = [None if piece is None else copies[id(piece)] for piece in sent]
    by_rank = pairwise.without_shared_memory(comm.rank, by_rank, dense)
    sources = {id(piece): _bytes_of(piece) for piece in by_rank if piece is not None}
    targets = {rank: _bytes_of(piece) for rank, piece in enumerate(dense) if piece is not None}
    own_target, own_source = dense[comm.rank], by_rank[comm.rank]
    if pairwise.is_copied(own_source, own_target):
        targets[comm.rank].copy_(sources[id(own_source)])
    from_ranks = [rank for rank in targets if rank != comm.rank]
    to_ranks = {r: id(p) for r, p in enumerate(by_rank) if p is not None and r != comm.rank}

    def exchange(leaving: Tensors, arriving: Tensors) -> None:
        placed: tuple[list[torch.Tensor | None], list[torch.Tensor | None]]
        placed = [None] * comm.size, [None] * comm.size
        for ranks, tensors, pieces in zip(
            (to_ranks, from_ranks), (leaving, arriving), placed, strict=True
        ):
            for rank, tensor in zip(ranks, tensors, strict=True):
                pieces[rank] = tensor
        pairwise.exchange(comm, *placed)

    step = max(_LEAST_CUT_BYTES, _ROUND_BYTES // (2 * comm.size))
    lengths = [sources[key].numel() for key in to_ranks.values()]
    lengths += [targets[rank].numel() for rank in from_ranks]
    rounds = []
    for start in range(0, max(lengths, default=0), step):
        cut = {key: source[start : start + step] for key, source in sources.items()}
        arriving = [targets[rank][start : start + step] for rank in from_ranks]
        rounds.append(([cut[key] for key in to_ranks.values()], arriving))
    relay.exchange_in_rounds(rounds, exchange)
    for piece, target in zip(dense, received, strict=True):
        if piece is not None and target is not None:
            from_host(piece, target)


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    return dense.view(-1).view(torch.uint8)


def reduce_scatter_in_rounds(
    comm: MPI.Comm, relay: Relay | None, output: torch.Tensor, pieces: Tensors, op: Reduction
) -> bool:
    """Reduce `pieces[r]` into `output` on rank r if these are long and on a device.

    Returns whether they were. Other ranks may reduce theirs at once. Collective.
    """
    longest = max(piece.numel() for piece in pieces)
    size = output.element_size()
    is_short = comm.size * longest * size <= 2 * _ROUND_BYTES
    if relay is None or is_short or any(tensor.is_cpu for tensor in (output, *pieces)):
        return False
    dense = contiguous(output)
    result = dense.view(-1)
    parts = [contiguous(piece).view(-1) for piece in pieces]
    least = pairwise.elements_per_piece(comm, output)
    most = min(_ROUND_BYTES, longest_chunk(relay.settings.relay_memory_mb)) // size
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
    is_mixed = len({value.device for value in (tensor, *pieces)}) > 1
    copy = to_host if is_mixed else contiguous
    source = copy(tensor).view(-1)
    dense = [copy(piece) for piece in others]
    flat = [piece.view(-1) for piece in dense]
    step = max(_LEAST_CUT_BYTES, _ROUND_BYTES // comm.size) // tensor.element_size()
    rounds = [
        ([source[start : start + step]], [piece[start : start + step] for piece in flat])
        for start in range(0, max(piece.numel() for piece in pieces), step)
    ]

    def exchange(sent: Tensors, received: Tensors) -> None:
        targets: list[torch.Tensor | None] = [*received]
        targets.insert(comm.rank, None)
        pairwise.exchange(comm, [*sent] * comm.size, targets)

    relay.exchange_in_rounds(rounds, exchange)
    for gathered, piece in zip(dense, others, strict=True):
        from_host(gathered, piece)
    target = pieces[comm.rank].detach()
    if target.data_ptr() != tensor.data_ptr():
        target.copy_(tensor.detach().view(target.shape))
