"""Collectives of contiguous tensors in host memory, by MPI, in place. Collective over `comm`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.mpi import pairwise
from kaitian_mpi.mpi.datatypes import (
    ACCUMULATION_DTYPES,
    MAX_COUNT,
    SUM,
    Reduction,
    absolute_type,
    as_buffer,
    as_raw_buffer,
    separate,
)

ANY_SOURCE = MPI.ANY_SOURCE
SHORT_BYTES = 64 << 10
"""Up to this size a reduction by one nonblocking call is the fastest."""
# Reductions longer than this are faster in pieces that fit in the cache; see docs/benchmarks.md.
_LONG_BYTES = 8 << 20
_PIECE_BYTES = 2 << 20
# Above this size mpi/pairwise.py's reduce-scatter is faster than MPI's.
_DIRECT_BYTES = 512 << 10


def allreduce(comm: MPI.Comm, tensor: torch.Tensor, op: Reduction = SUM) -> None:
    """Reduce `tensor` over all ranks, with the result on every rank."""
    if comm.size == 1:
        return
    for chunk in allreduce_chunks(comm, tensor.view(-1)):
        if op.mpi_supports(chunk.dtype):
            comm.Allreduce(MPI.IN_PLACE, as_buffer(chunk), op.mpi_op)
            op.divide_average(chunk, comm.size)
        else:
            pairwise.allreduce(comm, chunk, op)


def allreduce_chunks(comm: MPI.Comm, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a flat tensor into chunks by its length and dtype and the number of ranks alone."""
    if tensor.dtype in ACCUMULATION_DTYPES:
        return tensor.split(pairwise.elements_per_round(comm, tensor))
    if tensor.nbytes <= _LONG_BYTES:
        return (tensor,)
    return tensor.split(_PIECE_BYTES // tensor.element_size())


def broadcast(comm: MPI.Comm, tensor: torch.Tensor, root: int) -> None:
    """Copy `tensor` from rank `root` of `comm` to every rank; any dtype."""
    if comm.size > 1:
        comm.Bcast(as_raw_buffer(tensor), root)


def reduce_pieces(
    comm: MPI.Comm, tensor: torch.Tensor, shares: Sequence[int], op: Reduction = SUM
) -> None:
    """Reduce piece r of `tensor`, of length `shares[r]`, to rank r of `comm`, in place."""
    if comm.size == 1:
        return
    pieces = tensor.view(-1).split([*shares, *[0] * (comm.size - len(shares))])
    in_pieces = len(shares) > 1 and max(shares) < tensor.numel()
    if in_pieces or not op.mpi_supports(tensor.dtype):
        pairwise.reduce_scatter(comm, pieces[comm.rank], pieces, op)
        return
    for root, share in enumerate(pieces):
        _reduce(comm, share, root, op)


def _reduce(comm: MPI.Comm, tensor: torch.Tensor, root: int, op: Reduction) -> None:
    for piece in tensor.split(max(1, _PIECE_BYTES // tensor.element_size())):
        if comm.rank != root:
            comm.Reduce(as_buffer(piece), None, op.mpi_op, root)
        elif root == 0:
            comm.Reduce(MPI.IN_PLACE, as_buffer(piece), op.mpi_op, root)
        else:
            # MPICH before 4.2.1 is in place at rank 0 only (pmodels/mpich#6540, #6893).
            rank_piece = piece.clone()
            comm.Reduce(as_buffer(rank_piece), as_buffer(piece), op.mpi_op, root)
    if comm.rank == root:
        op.divide_average(tensor, comm.size)


def reduce_scatter(
    comm: MPI.Comm, result: torch.Tensor, tensor: torch.Tensor, op: Reduction
) -> None:
    """Reduce part r of `tensor`, split equally, into `result` on rank r."""
    if tensor.nbytes > _DIRECT_BYTES or not op.mpi_supports(tensor.dtype):
        parts = tensor.view(-1).split(max(1, result.numel()))
        pairwise.reduce_scatter(comm, result.view(-1), parts or (result,), op)
        return
    source = separate(tensor, result)
    comm.Reduce_scatter_block(as_buffer(source), as_buffer(result), op.mpi_op)
    op.divide_average(result, comm.size)


def gather_pieces(comm: MPI.Comm, tensor: torch.Tensor, shares: Sequence[int]) -> None:
    """Copy piece r of `tensor` from rank r of `comm` to every rank, in place (an all-gather)."""
    if comm.size == 1:
        return
    if len(shares) > 1 and tensor.numel() <= MAX_COUNT:
        counts = [*shares, *[0] * (comm.size - len(shares))]
        memory, kind = as_raw_buffer(tensor)
        comm.Allgatherv(MPI.IN_PLACE, (memory, counts, kind))
        return
    for root, piece in enumerate(tensor.view(-1).split(list(shares))):
        broadcast(comm, piece, root)


def start_allreduce(comm: MPI.Comm, tensor: torch.Tensor, op: Reduction) -> MPI.Request:
    """Start reducing `tensor` in place; for an average, the caller divides the result."""
    return comm.Iallreduce(MPI.IN_PLACE, as_buffer(tensor), op.mpi_op)


def start_all_to_all(
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
    """Return a tensor's pieces as arguments of `Ialltoallw`, whose counts are C ints."""
    offsets = [0, *itertools.accumulate(count * tensor.element_size() for count in counts)]
    if tensor.nbytes <= MAX_COUNT:
        memory, kind = as_raw_buffer(tensor)
        return memory, list(counts), offsets[:-1], [kind] * len(counts)
    pieces = list(itertools.pairwise(offsets))
    kinds = [absolute_type(tensor, *piece) if piece[1] > piece[0] else MPI.BYTE for piece in pieces]
    return MPI.BOTTOM, [int(end > start) for start, end in pieces], [0] * len(pieces), kinds
