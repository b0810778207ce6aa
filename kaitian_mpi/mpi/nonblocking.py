"""Collectives on tensors in host memory, started without waiting for the other ranks.

They save the meeting that a blocking collective needs before it, lest it spins. Data that only
moves goes as fast so at nearly any length; reductions do when they are short.

Every function is collective over `comm`. Tensors are contiguous, on the CPU, and must stay as they
are until the request is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi.datatypes import (
    LARGEST_COUNT,
    Reduction,
    as_units,
    moved,
    typed,
)

_SHORT_BYTES = 64 << 10


def is_short_sum(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is to be reduced is worth starting so."""
    return tensor.nbytes <= _SHORT_BYTES


def allreduce(comm: MPI.Comm, tensor: torch.Tensor, op: Reduction) -> MPI.Request:
    """Start reducing `tensor` in place; an average is to be divided afterwards."""
    return comm.Iallreduce(MPI.IN_PLACE, typed(tensor), op.mpi_op)


def reduce_scatter(
    comm: MPI.Comm, result: torch.Tensor, tensor: torch.Tensor, op: Reduction
) -> MPI.Request:
    """Start reducing equal part r of `tensor` to `result` on rank r; an average as above."""
    return comm.Ireduce_scatter_block(typed(tensor), typed(result), op.mpi_op)


def broadcast(comm: MPI.Comm, tensor: torch.Tensor, root: int) -> MPI.Request:
    """Start copying `tensor` from rank `root` to every rank; any dtype."""
    return comm.Ibcast(moved(tensor), root)


def suits_all_gather(comm: MPI.Comm, gathered: torch.Tensor) -> bool:
    """Return whether an all-gather is worth starting so: two ranks swap long parts faster."""
    fits = gathered.numel() <= LARGEST_COUNT
    return fits and (comm.size > 2 or gathered.nbytes <= _SHORT_BYTES)


def all_gather(comm: MPI.Comm, gathered: torch.Tensor, tensor: torch.Tensor) -> MPI.Request:
    """Start gathering every rank's `tensor`, all of one length, into `gathered`; any dtype."""
    return comm.Iallgather(moved(tensor), moved(gathered))


def all_to_all(
    comm: MPI.Comm,
    received: torch.Tensor,
    received_counts: Sequence[int],
    sent: torch.Tensor,
    sent_counts: Sequence[int],
) -> MPI.Request:
    """Start sending piece r of `sent` to rank r, and receiving its pieces in order; any dtype.

    Raises:
        UnsupportedError: there is more than MPI can count.
    """
    unit = math.gcd(
        16, *(count * sent.element_size() for count in (*sent_counts, *received_counts))
    )
    source, target = _in_units(sent, sent_counts, unit), _in_units(received, received_counts, unit)
    return comm.Ialltoallv(source, target)


def _in_units(
    tensor: torch.Tensor, counts: Sequence[int], unit_bytes: int
) -> tuple[MPI.buffer, list[int], MPI.Datatype]:
    if tensor.nbytes // unit_bytes > LARGEST_COUNT:
        raise UnsupportedError(
            f"all_to_all_single: found {tensor.nbytes} bytes to cut in units of {unit_bytes}, "
            "needed fewer, or parts of a multiple of 16 bytes; all_to_all takes lists of any size"
        )
    memory, kind = as_units(tensor, unit_bytes)
    return memory, [count * tensor.element_size() // unit_bytes for count in counts], kind
