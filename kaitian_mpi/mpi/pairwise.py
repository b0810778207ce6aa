"""Collectives by messages between each pair of ranks, on the caller's tensors without copies.

Reductions add up incoming pieces in the cache. 16-bit floats are accumulated in float32 and rounded
once; sums of 8 and 16-bit integers wrap. Collective; tensors are contiguous, on the CPU, by rank.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from mpi4py import MPI

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.datatypes import ACCUMULATION_DTYPES, Reduction, as_raw_buffer, separate
from kaitian_mpi.runtime import tags, ulfm
from kaitian_mpi.runtime.polling import keep_alive

# A piece is long enough to amortize a message's fixed cost; the scratch memory for all pieces that
# arrive at once roughly fits in the cache.
_PIECE_BYTES = 1 << 20
_SCRATCH_BYTES = 4 << 20
_MIN_PIECE_BYTES = 32 << 10

DIFFERENT_SIZES = (
    "the ranks' tensors have different sizes, or they called different collectives; pad tensors to "
    "one shape first, as those of unequal batches (Accelerate's pad_across_processes does)"
)

Pieces = Sequence["torch.Tensor | None"]
"""By rank."""

_threads = threading.local()


def exchange(comm: MPI.Comm, sent: Pieces, received: Pieces) -> None:
    """Send `sent[r]` to rank r and receive `received[r]` from it; None and empty are skipped.

    Raises:
        CollectiveError: a rank sends more than fits in `received[r]`.
    """
    exchange_all(comm, [(sent, received)])


def exchange_all(comm: MPI.Comm, transfers: Sequence[tuple[Pieces, Pieces]]) -> None:
    """Do several exchanges at the same time: see `exchange`."""
    ranks = others(comm.rank, comm.size)
    arriving: list[MPI.Request] = []
    leaving: list[tuple[int, MPI.Request]] = []
    try:
        for _, received in transfers:
            for rank in ranks:
                if (piece := received[rank]) is not None and piece.numel():
                    arriving.append(comm.Irecv(as_raw_buffer(piece), rank, tags.PAIRWISE))
        for sent, _ in transfers:
            for rank in ranks:
                if (piece := sent[rank]) is not None and piece.numel():
                    request = comm.Isend(as_raw_buffer(piece), rank, tags.PAIRWISE)
                    leaving.append((rank, request))
        for sent, received in transfers:
            target, source = received[comm.rank], sent[comm.rank]
            if target is not None and source is not None and is_copied(source, target):
                target.view(-1).copy_(source.view(-1))
        # Not by Waitall: if one fails, Open MPI frees others that go on, and ends the job then.
        for request in (*arriving, *(request for _, request in leaving)):
            request.Wait()
    except MPI.Exception as error:
        unlike = different_sizes_error(error)
        if unlike is None:
            ulfm.revoke_all()  # so that all requests end, besides those to a lost rank
            if not ulfm.is_revoked(comm):
                raise
            lost = ulfm.lost_ranks(comm)
            keep_alive(transfers, [request for rank, request in leaving if rank in lost])
            leaving = [(rank, request) for rank, request in leaving if rank not in lost]
        # They use memory that is no longer ours.
        for request in (*arriving, *(request for _, request in leaving)):
            with suppress(MPI.Exception):
                request.Wait()
        raise unlike or error from error


def without_shared_memory(rank: int, sent: Pieces, received: Pieces) -> list[torch.Tensor | None]:
    """Return the pieces that `rank` sends, copies if an exchange would overwrite them before.

    A piece that the rank receives from itself, where it already is, is not written. Not collective.
    """
    written = [
        target
        for source_rank, target in enumerate(received)
        if target is not None and (source_rank != rank or is_copied(sent[rank], target))
    ]
    apart: dict[int, torch.Tensor] = {}  # by `id`, as a gather sends one tensor to all ranks
    for piece in sent:
        if piece is not None and id(piece) not in apart:
            apart[id(piece)] = functools.reduce(separate, written, piece)
    return [None if piece is None else apart[id(piece)] for piece in sent]


def is_copied(own_source: torch.Tensor | None, own_target: torch.Tensor | None) -> bool:
    """Return whether a rank has to copy what it sends to itself: it has both, in two places."""
    if own_source is None or own_target is None:
        return False
    return own_source.data_ptr() != own_target.data_ptr()


def different_sizes_error(error: Exception) -> CollectiveError | None:
    """Return the error to raise if a message was longer than its buffer, else None."""
    if not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_TRUNCATE:
        return None
    return CollectiveError(DIFFERENT_SIZES)


def broadcast_error(error: Exception) -> CollectiveError | None:
    """Return the error to raise if the root's message had another size, else None.

    MPICH compares the two on three ranks and more, but names no reason (`MPI_ERR_OTHER`).
    """
    if not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_OTHER:
        return None
    return CollectiveError(DIFFERENT_SIZES)


def reduce_scatter(
    comm: MPI.Comm, result: torch.Tensor, pieces: Sequence[torch.Tensor], op: Reduction
) -> None:
    """Reduce every rank's flat `pieces[r]` into `result` on rank r, which may be that piece."""
    step = elements_per_piece(comm, result)
    # All ranks do as many rounds as the longest piece needs.
    for start in range(0, max(piece.numel() for piece in pieces), step):
        parts = [piece[start : start + step] for piece in pieces]
        _reduce_parts(comm, result[start : start + step], parts, op)


def allreduce(comm: MPI.Comm, tensor: torch.Tensor, op: Reduction) -> None:
    """Reduce flat `tensor` over all ranks, in place; the results are bit-identical."""
    share = math.ceil(tensor.numel() / comm.size)
    parts = [tensor[r * share : (r + 1) * share] for r in range(comm.size)]
    rank_part = parts[comm.rank]
    reduce_scatter(comm, rank_part, parts, op)
    exchange(comm, [rank_part] * comm.size, parts)


def elements_per_piece(comm: MPI.Comm, tensor: torch.Tensor) -> int:
    """Return the elements of each piece of this dtype that `reduce_scatter` reduces in a round.

    A rank may call it for consecutive slices while others call it once, if the lengths of all but
    the last are multiples of this: the messages are the same.
    """
    piece = min(_PIECE_BYTES, max(_MIN_PIECE_BYTES, _SCRATCH_BYTES // comm.size))
    return piece // tensor.element_size()


def elements_per_round(comm: MPI.Comm, tensor: torch.Tensor) -> int:
    """Return the number of elements of this dtype that `allreduce` reduces in one round."""
    return elements_per_piece(comm, tensor) * comm.size


def _reduce_parts(
    comm: MPI.Comm, result: torch.Tensor, parts: list[torch.Tensor], op: Reduction
) -> None:
    length = result.numel()
    scratch = _scratch(result.dtype, length * comm.size).view(comm.size, length)
    exchange(comm, _without(parts, comm.rank), _without(list(scratch), comm.rank))
    if not length:
        return
    arrived = [scratch[rank] for rank in others(comm.rank, comm.size)]
    # A sum of two 16-bit floats is rounded once anyway; a sum of integers is not rounded.
    is_exact = len(arrived) == 1 or not result.is_floating_point()
    in_place = result.dtype not in ACCUMULATION_DTYPES or (is_exact and not op.is_average)
    total = result if in_place else torch.empty(length, dtype=ACCUMULATION_DTYPES[result.dtype])
    sum_so_far = parts[comm.rank]
    if not in_place or not arrived:
        sum_so_far = total.copy_(sum_so_far)
    for addend in arrived:
        sum_so_far = op.combine(sum_so_far, addend, out=total)
    op.divide_average(total, comm.size)
    if not in_place:
        result.copy_(total)


def others(rank: int, size: int) -> list[int]:
    """Return the other ranks, the next one first, so that not all start with the same one."""
    return [(rank + distance) % size for distance in range(1, size)]


def _without(tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor | None]:
    return [None if index == rank else tensor for index, tensor in enumerate(tensors)]


def _scratch(dtype: torch.dtype, elements: int) -> torch.Tensor:
    needed = elements * dtype.itemsize
    memory: torch.Tensor | None = getattr(_threads, "scratch", None)
    if memory is None or memory.numel() < needed:
        memory = _threads.scratch = torch.empty(needed, dtype=torch.uint8)
    return memory[:needed].view(dtype)
