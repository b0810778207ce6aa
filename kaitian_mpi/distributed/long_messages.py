"""Messages that go in pieces, by a few page-locked buffers of an accelerator.

A copy of a whole long tensor would be in memory that is not page-locked, which is scarce: copies to
and from that are several times slower, and block. While a piece is copied, MPI moves others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import (
    contiguous,
    ends_of_streams,
    from_host,
    writing,
)
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.messages import (
    DIFFERENT_SIZES,
    HEADER_BYTES,
    Message,
    receive_if_arrived,
)
from kaitian_mpi.distributed.relay.chunking import COUNT
from kaitian_mpi.distributed.relay.copies import Copies, Event, copies_of
from kaitian_mpi.distributed.relay.relay import Slot, Slots
from kaitian_mpi.mpi.datatypes import as_raw_buffer
from kaitian_mpi.runtime.polling import keep_alive

if TYPE_CHECKING:
    from mpi4py import MPI

_PIECE_BYTES = 4 << 20


class Ring:
    """The few buffers of a message under way, and the copies to and from them."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        """Allocate the buffers; on the host none, as messages use the tensor's own memory."""
        self.copies = copies
        if device_of(device).is_host:
            self.free = deque(Slot(torch.empty(0, dtype=torch.uint8)) for _ in range(COUNT))
        else:
            slots = Slots(pins=device_of(device).pins_memory)
            count = slots.provide(COUNT, _PIECE_BYTES)
            self.free = deque(slots.take() for _ in range(count))


class RingPool:
    """The buffers of messages that go in pieces, which are reused.

    Each message in flight has its own few: it must not wait for the buffers of another message,
    which may not finish before it on the other rank.
    """

    def __init__(self) -> None:
        self._idle: dict[torch.device, list[Ring]] = {}
        self._copies: dict[torch.device, Copies] = {}

    def copies(self, device: torch.device) -> Copies:
        """Return the copies of a device's tensors."""
        if device not in self._copies:
            self._copies[device] = copies_of(device)
        return self._copies[device]

    def take(self, device: torch.device) -> Ring:
        """Return buffers that no other message has."""
        try:
            return self._idle.setdefault(device, []).pop()
        except IndexError:
            return Ring(device, self.copies(device))

    def give(self, device: torch.device, ring: Ring) -> None:
        """Take back unused buffers; copies may still use them, which the buffers know."""
        self._idle[device].append(ring)


class Header:
    """The announcement of a message that goes in pieces: the bytes of its tensor."""

    def __init__(self, nbytes: int) -> None:
        from mpi4py import MPI

        self.memory = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        self.memory[:-1].view(torch.int64).fill_(nbytes)
        self.request: MPI.Request | None = None
        self.status = MPI.Status()
        self.is_exchanged = False

    def announces(self, nbytes: int) -> bool:
        """Return whether what was received is the announcement of so many bytes."""
        from mpi4py import MPI

        is_header = self.status.Get_count(MPI.BYTE) == HEADER_BYTES
        return is_header and self.memory[:-1].view(torch.int64).item() == nbytes


@not_compiled
class LongMessage(Message):
    """A message that begins with its length; its pieces follow, by the same tag."""

    def __init__(
        self,
        tensor: torch.Tensor,
        comm: MPI.Comm,
        peer: int,
        tag: int,
        pool: RingPool,
        *,
        is_receive: bool,
    ) -> None:
        """Prepare to send a tensor, or to receive into it."""
        super().__init__(tensor, peer, tag, is_receive=is_receive)
        self._comm = comm
        self._pool = pool
        self._dense = contiguous(tensor)
        if is_receive:  # its user may drop it as soon as the last copy is queued
            pool.copies(self._dense.device).keep(self._dense)
        # No stream waits for the work queued so far: a message behind this one would wait as well.
        self._ready = ends_of_streams([self._dense])
        self._left = deque(self._dense.view(-1).split(_PIECE_BYTES // tensor.element_size()))
        self._header = Header(0 if is_receive else tensor.nbytes)
        self._ring: Ring | None = None
        self._copied: deque[tuple[torch.Tensor, torch.Tensor, Slot, Event]] = deque()
        self._at_mpi: deque[tuple[MPI.Request, torch.Tensor, torch.Tensor, Slot]] = deque()

    @property
    def is_waiting_to_start(self) -> bool:
        is_over = self.is_canceled or bool(self.fault)
        return not is_over and bool(self._left or self._copied)

    def start(self, reserved: Collection[int]) -> None:
        header = self._header
        memory = self._header.memory
        if header.request is None and self.is_receive:
            arriving = receive_if_arrived(self._comm, memory, self.peer, self.tag, reserved)
            if arriving is not None:
                header.request, header.memory = arriving
        elif header.request is None:
            header.request = self._comm.Isend(as_raw_buffer(memory), self.peer, self.tag)
        if self.is_receive:
            self._post_pieces()
        else:
            self._send_pieces()

    def is_transferred(self) -> bool:
        header = self._header
        if header.request is not None and not header.is_exchanged:
            header.is_exchanged = header.request.Test(header.status)
            if header.is_exchanged and self.is_receive:
                self.is_canceled = header.status.Is_cancelled()
                self._source = header.status.Get_source()
                self.fault = "" if header.announces(self._dense.nbytes) else DIFFERENT_SIZES
        if header.is_exchanged and not self.fault:
            self._land_pieces()
        is_done = header.is_exchanged and not (self._left or self._copied or self._at_mpi)
        return is_done or self.is_canceled or bool(self.fault)

    def cancel(self) -> None:
        if self._header.request is None:
            self.is_canceled = True
        elif not self._header.is_exchanged:
            self._header.request.Cancel()
        else:
            for request, *_ in self._at_mpi:
                request.Cancel()
            keep_alive(*self.in_use())
            self.fault = (
                "only a part of the tensor had arrived when it timed out, or the group ended"
            )

    def in_use(self) -> list[object]:
        at_mpi = [(request, host) for request, host, *_ in self._at_mpi]
        copied = [host for host, *_ in self._copied]  # by the device
        return [self._header.request, self._header.memory, at_mpi, copied]

    def finish(self) -> None:
        ring = self._buffers()
        device = self._dense.device
        with ring.copies.on_back_stream() if self.is_receive else nullcontext():
            if self.is_receive:
                from_host(self._dense, self._tensor, non_blocking=True)
            super().finish()
        self._pool.give(device, ring)

    def _post_pieces(self) -> None:
        """Have MPI receive pieces in the buffers that are free, once it is known from whom."""
        if not self._header.is_exchanged:
            return
        free = self._buffers().free
        while self._left and free and (free[0].free is None or free[0].free.query()):
            slot = free.popleft()
            piece = self._left.popleft()
            host = piece if piece.is_cpu else slot.view_as(piece)
            request = self._comm.Irecv(as_raw_buffer(host), self._source, self.tag)
            self._at_mpi.append((request, host, piece, slot))

    def _send_pieces(self) -> None:
        """Copy out as many pieces as there are buffers, and have MPI send what is there."""
        if not self._is_ready():
            return
        ring = self._buffers()
        while self._left and ring.free:
            slot, piece = ring.free.popleft(), self._left.popleft()
            host = piece if piece.is_cpu else slot.view_as(piece)
            copied = ring.copies.copy_out(host, piece, slot.free)
            self._copied.append((host, piece, slot, copied))
        while self._copied and self._copied[0][-1].query():
            host, piece, slot, _ = self._copied.popleft()
            request = self._comm.Isend(as_raw_buffer(host), self.peer, self.tag)
            self._at_mpi.append((request, host, piece, slot))

    def _land_pieces(self) -> None:
        """Take back the buffers of pieces that MPI is done with."""
        while self._at_mpi and self._is_ready() and self._at_mpi[0][0].Test():
            _, host, piece, slot = self._at_mpi.popleft()
            if self.is_receive:
                with writing([piece]):
                    slot.free = self._buffers().copies.copy_back(piece, host)
            self._buffers().free.append(slot)
            self.moved += 1
            if self.awaited_since < float("inf"):  # it may take long, as long as it goes on
                self.awaited_since = time.perf_counter()

    def _buffers(self) -> Ring:
        """Return the message's buffers; from its first piece on it has some."""
        if self._ring is None:
            self._ring = self._pool.take(self._dense.device)
        return self._ring

    def _is_ready(self) -> bool:
        """Return whether the device has done what was queued before the message was."""
        return all(end.is_reached() for end in self._ready)
