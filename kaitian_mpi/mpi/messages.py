"""Nonblocking point-to-point messages of tensors in host memory."""

from __future__ import annotations

import torch
from mpi4py import MPI

from kaitian_mpi.mpi.datatypes import as_raw_buffer

ANY_SOURCE = MPI.ANY_SOURCE


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
