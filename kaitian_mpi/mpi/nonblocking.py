"""Nonblocking collectives and messages of contiguous tensors in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.mpi.datatypes import (
    MAX_COUNT,
    Reduction,
    absolute_type,
    as_buffer,
    as_raw_buffer,
    as_unit_buffer,
)

ANY_SOURCE = MPI.ANY_SOURCE
SHORT_BYTES = 64 << 10
"""Up to this size a reduction by one nonblocking call is the fastest."""


def allreduce(comm: MPI.Comm, tensor: torch.Tensor, op: Reduction) -> MPI.Request:
    """Start reducing `tensor` in place; for an average, the caller divides the result."""
    return comm.Iallreduce(MPI.IN_PLACE, as_buffer(tensor), op.mpi_op)


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
    """Return a tensor's pieces as arguments of `Ialltoallw`, whose counts are C ints."""
    offsets = [0, *itertools.accumulate(count * tensor.element_size() for count in counts)]
    if tensor.nbytes <= MAX_COUNT:
        memory, kind = as_unit_buffer(tensor, tensor.element_size())
        return memory, list(counts), offsets[:-1], [kind] * len(counts)
    pieces = list(itertools.pairwise(offsets))
    kinds = [absolute_type(tensor, *piece) if piece[1] > piece[0] else MPI.BYTE for piece in pieces]
    return MPI.BOTTOM, [int(end > start) for start, end in pieces], [0] * len(pieces), kinds


class Transfer:
    """A send or receive in progress. Keeps its buffer alive until MPI is done with it."""

    def __init__(self, request: MPI.Request, buffer: torch.Tensor, *, is_receive: bool) -> None:
        self._request = request
        self._buffer = buffer
        self._status = MPI.Status()
        self._is_done = False
        self.is_receive = is_receive

    @property
    def source(self) -> int:
        """The sender's rank; only after a completed receive."""
        return self._status.Get_source()

    def done(self) -> bool:
        """Return whether MPI is done with the buffer; lets MPI make progress."""
        # A second test would clear the status.
        self._is_done = self._is_done or bool(self._request.Test(self._status))
        return self._is_done

    @property
    def is_cancelled(self) -> bool:
        """Whether a completed receive was cancelled, and so got no message."""
        return self._status.Is_cancelled()

    def cancel(self) -> None:
        """Cancel a receive that no message has matched."""
        self._request.Cancel()


def start_send(comm: MPI.Comm, buffer: torch.Tensor, target: int, tag: int) -> Transfer:
    """Start sending a contiguous host tensor."""
    request = comm.Isend(as_raw_buffer(buffer), target, tag)
    return Transfer(request, buffer, is_receive=False)


def start_receive(comm: MPI.Comm, buffer: torch.Tensor, source: int, tag: int) -> Transfer:
    """Start receiving into a contiguous host tensor; `ANY_SOURCE` accepts any sender."""
    request = comm.Irecv(as_raw_buffer(buffer), source, tag)
    return Transfer(request, buffer, is_receive=True)
