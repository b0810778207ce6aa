"""The work of a pending message between two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives import staging
from kaitian_mpi.distributed.collectives.staging import StreamEnd, from_host
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.collectives.work import Queued
from kaitian_mpi.errors import format_ranks
from kaitian_mpi.mpi.datatypes import as_raw_buffer
from kaitian_mpi.mpi.host_collectives import ANY_SOURCE

if TYPE_CHECKING:
    from mpi4py import MPI

HEADER_BYTES = 9
"""The length of the announcement of a message that goes in pieces: of no tensor of numbers."""

Arriving = tuple["MPI.Request", torch.Tensor]
"""The request of a message that MPI is receiving, and the memory that it is received in."""

DIFFERENT_SIZES = (
    "the tensors of send and recv have different sizes; give both ranks tensors of one size"
)


def receive_if_arrived(
    comm: MPI.Comm, memory: torch.Tensor, source: int, tag: int, reserved: Collection[int]
) -> Arriving | None:
    """Start receiving a message that has arrived; None if none has.

    The next messages of the `reserved` ranks are for others that wait for these ranks alone.

    One that is longer than `memory` is received elsewhere: Open MPI (5.0.11) reports that it is cut
    off, but has written all of it, beyond the end of the memory, if it is longer than the messages
    that are sent at once.
    """
    from mpi4py import MPI

    status = MPI.Status()
    sources = [source]
    if source == ANY_SOURCE and reserved:
        sources = [rank for rank in range(comm.size) if rank not in reserved]
    if not any(comm.Iprobe(rank, tag, status) for rank in sources):
        return None
    nbytes = status.Get_count(MPI.BYTE)
    if nbytes > memory.nbytes:
        memory = torch.empty(nbytes, dtype=torch.uint8)
    return comm.Irecv(as_raw_buffer(memory), status.Get_source(), tag), memory


@not_compiled
class Message(Queued):
    """The work of a pending message; done when its tensor may be used again.

    Its timeout starts with the first wait, as with gloo: a receive may be posted long before. It
    also starts when its future is taken, as a wait for that, or for what follows, is not seen.
    """

    fault = ""
    """Why what MPI has received is not the tensor; empty if it is."""
    is_canceled = False
    """Whether a receive that MPI is done with was canceled, and so got no message."""

    def __init__(self, tensor: torch.Tensor, peer: int, tag: int, *, is_receive: bool) -> None:
        # A message is sent from a copy, so that its end is no matter of the device's streams.
        super().__init__("recv" if is_receive else "send", [tensor] if is_receive else [])
        self.peer = peer
        self.tag = tag
        self.is_receive = is_receive
        self._tensor = tensor
        self._source = -1
        self.awaited_since = float("inf")
        """When it was first waited for, or its future taken, by `time.perf_counter`."""
        self.peer_left = False
        self.moved = 0
        """The number of its pieces that MPI is done with."""

    def set_peer_left(self, has_left: bool) -> None:
        """Note whether the other rank has left the group; what it sent before may still arrive."""
        self.peer_left = has_left

    def _source_rank(self) -> int:
        """Return the sender's rank; -1 until the message has been received."""
        return self._source

    source_rank = _source_rank

    @property
    def is_waiting_to_start(self) -> bool:
        """Whether MPI has not been given all of the message yet."""
        raise NotImplementedError

    def start(self, reserved: Collection[int]) -> None:
        """Give MPI what it can be given of the message, as `receive_if_arrived` says."""
        raise NotImplementedError

    def is_transferred(self) -> bool:
        """Return whether MPI is done with the message; lets MPI make progress."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel what no message has matched of a receive."""
        raise NotImplementedError

    def in_use(self) -> list[object]:
        """Return only the objects that MPI may still access, as errors keep references."""
        raise NotImplementedError

    def holds_back(self, later: Message) -> bool:
        """Return whether MPI must not be given a later message before all of this one.

        MPI keeps the order of messages that it could match with each other's receives.
        """
        return self.precedes(later) and self.peer in (later.peer, ANY_SOURCE)

    def precedes(self, later: Message) -> bool:
        """Return whether what this one waits for, of its rank, may not become a later one's."""
        is_alike = self.tag == later.tag and self.is_receive == later.is_receive
        return self.is_waiting_to_start and is_alike

    def describe(self, size: int) -> str:
        who = "any rank" if self.peer == ANY_SOURCE else format_ranks([self.peer], size)
        return f"a message from {who}" if self.is_receive else f"{who} to receive"

    def describe_abandoned(self, size: int) -> str:
        """Return that the ranks which it waits for have ended the group."""
        if self.peer == ANY_SOURCE:
            return "recv: all other ranks have ended the group, so no message will come"
        action = "sending" if self.is_receive else "receiving"
        return (
            f"{self.name}: {format_ranks([self.peer], size)} ended the group without {action} the "
            "message; check that sends and receives match"
        )

    def wait(self, timeout: timedelta | None = None) -> bool:  # also called by `synchronize`
        self._start_timeout()
        return super().wait(timeout)

    def get_future(self) -> torch.futures.Future:
        self._start_timeout()
        return super().get_future()

    def _start_timeout(self) -> None:
        self.awaited_since = min(self.awaited_since, time.perf_counter())


@not_compiled
class ShortMessage(Message):
    """A message of one piece, by way of a copy of a device's tensor in host memory."""

    def __init__(
        self,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        start: Callable[[Collection[int]], Arriving | None],
        peer: int,
        tag: int,
        *,
        is_receive: bool,
        streams: staging.Streams = staging.NO_STREAMS,
        filled: StreamEnd | None = None,
    ) -> None:
        """Follow the request that `start` returns, once it does, with memory of the host.

        What is received in the buffer is for `tensor`. What is sent is there once `filled` is
        reached.
        """
        from mpi4py import MPI

        super().__init__(tensor, peer, tag, is_receive=is_receive)
        self._buffer = buffer
        self._streams = streams
        self._start = start
        self._filled = filled
        self._request: MPI.Request | None = None
        self._memory = buffer
        self._status = MPI.Status()
        self._is_transferred = False

    @property
    def is_waiting_to_start(self) -> bool:
        return self._request is None and not self._is_transferred

    def start(self, reserved: Collection[int]) -> None:
        if self._request is not None or not (self._filled is None or self._filled.is_reached()):
            return
        started = self._start(reserved)
        if started is not None:
            self._request, self._memory = started

    def is_transferred(self) -> bool:
        from mpi4py import MPI

        # A second test would clear the status.
        if not self._is_transferred and self._request is not None:
            self._is_transferred = self._request.Test(self._status)
            if self._is_transferred and self.is_receive:
                self.is_canceled = self._status.Is_cancelled()
                nbytes = self._status.Get_count(MPI.BYTE)
                # MPI takes a shorter one as well, and gloo: the rest would keep its old numbers.
                if not self.is_canceled and nbytes != self._buffer.nbytes:
                    self.fault = DIFFERENT_SIZES
        return self._is_transferred

    def cancel(self) -> None:
        if self._request is not None:
            self._request.Cancel()
        else:
            self._is_transferred = self.is_canceled = True

    def in_use(self) -> list[object]:
        return [self._request, self._memory]

    def finish(self) -> None:
        self._source = self._status.Get_source()
        with self._streams:
            if self.is_receive:
                from_host(self._buffer, self._tensor, non_blocking=True)
            super().finish()
