"""Collectives on tensors in host memory, started without waiting for the other ranks.

They save the meeting that a blocking collective needs before it, lest it spins. Data that only
moves goes as fast so at nearly any length; reductions do when they are short.

Every function is collective over `comm`. Tensors are contiguous, on the CPU, and must stay as they
are until the request is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.mpi.datatypes import (
    LARGEST_COUNT,
    Reduction,
    as_units,
    moved,
    placed,
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
    """Start sending piece r of `sent` to rank r, and receiving its pieces in order; any dtype."""
    source, target = _by_rank(sent, sent_counts), _by_rank(received, received_counts)
    request = comm.Ialltoallw(source, target)
    for kind in (*source[-1], *target[-1]):
        if not kind.is_predefined:
            kind.Free()  # MPI keeps it as long as it needs it
    return request


def _by_rank(
    tensor: torch.Tensor, counts: Sequence[int]
) -> tuple[MPI.buffer | MPI.BottomType, list[int], list[int], list[MPI.Datatype]]:
    """Return a tensor's pieces as `Ialltoallw` takes them: memory, counts, places and types.

    Its counts and places are C ints, so each piece of a tensor that they could not reach becomes
    one value of a type of its own, which has the piece's place in it. Each rank may decide alone.
    """
    places = [0, *itertools.accumulate(count * tensor.element_size() for count in counts)]
    if tensor.nbytes <= LARGEST_COUNT:
        memory, kind = as_units(tensor, tensor.element_size())
        return memory, list(counts), places[:-1], [kind] * len(counts)
    pieces = list(itertools.pairwise(places))
    kinds = [placed(tensor, *piece) if piece[1] > piece[0] else MPI.BYTE for piece in pieces]
    return MPI.BOTTOM, [int(end > start) for start, end in pieces], [0] * len(pieces), kinds
