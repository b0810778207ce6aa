"""The relay's pipeline: neighboring chunks are copied out, exchanged and copied back at once.

The host memory is a ring of equal buffers, allocated once and used again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from kaitian_mpi.distributed.relay.copies import Copies, Event
from kaitian_mpi.observe.timeline.recorder import EXCHANGE, part

_log = logging.getLogger(__name__)

COUNT = 4
"""How many chunks are under way at once: one is copied out, one exchanged, one copied back, and
one is ready, so that a late copy does not stop the exchange."""

Exchange = Callable[[torch.Tensor], None]
"""Takes a contiguous tensor in host memory and changes it in place."""


@dataclass(eq=False)
class Slot:
    """One buffer in host memory."""

    memory: torch.Tensor
    """Bytes."""
    free: Event | None = None
    """When the device has read what the last user left; None if there was none."""

    def view_as(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the memory as a flat host tensor of a chunk's length and dtype."""
        return self.memory[: chunk.nbytes].view(chunk.dtype)


class Slots:
    """The buffers for the copies of one device.

    They are kept until the process group ends, and grow with the largest chunk so far. Each process
    group has its own: with shared ones, a group's operation could wait for the buffers of another
    group's, which cannot finish before it on other ranks.
    """

    def __init__(self, *, pins: bool) -> None:
        """Allocate nothing yet; `pins`: use page-locked memory, so that copies are asynchronous."""
        self._pins = pins
        self._ring: deque[Slot] = deque()
        self._slot_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        return self._slot_bytes * len(self._ring)

    def provide(self, chunks: int, chunk_bytes: int) -> int:
        """Make sure that there are slots for so many chunks; return how many there are.

        More than `COUNT` are of no use; memory is allocated only for more or larger chunks than
        ever before.
        """
        if chunk_bytes > self._slot_bytes:
            self.free_above(-1)  # those of an empty chunk, too
            self._slot_bytes = chunk_bytes
        while len(self._ring) < min(COUNT, chunks):
            self._ring.append(Slot(self._allocate()))
        return len(self._ring)

    def free_above(self, chunk_bytes: int) -> None:
        """Free the buffers if they are larger than this."""
        if self._slot_bytes <= chunk_bytes:
            return
        for slot in self._ring:
            if slot.free is not None:
                slot.free.synchronize()
        self._ring.clear()
        self._slot_bytes = 0

    def take(self) -> Slot:
        """Return the slot that was used the longest ago."""
        self._ring.rotate(-1)
        return self._ring[-1]

    def _allocate(self) -> torch.Tensor:
        if self._pins:
            try:
                return torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                _log.warning(
                    "no page-locked memory for the relay (%s): it uses %d MB of ordinary memory, "
                    "which is slower; raise the limit (ulimit -l) or lower --relay-memory-mb",
                    str(error).partition("\n")[0],
                    COUNT * self._slot_bytes >> 20,
                )
        return torch.empty(self._slot_bytes, dtype=torch.uint8)


def exchange_in_chunks(
    chunks: Sequence[torch.Tensor], exchange: Exchange, copies: Copies, slots: Slots
) -> None:
    """Apply `exchange` to a copy of each chunk in host memory, in order, and copy it back.

    Returns when the last copy back is queued: later work on the current stream comes after it. If
    `exchange` raises, the chunks so far are copied back.
    """
    count = slots.provide(len(chunks), max(chunk.nbytes for chunk in chunks))
    waiting = iter(chunks)
    fetched: deque[tuple[torch.Tensor, Slot, torch.Tensor, Event]] = deque()

    def fetch(number: int) -> None:
        for chunk in islice(waiting, number):
            slot = slots.take()
            host = slot.view_as(chunk)
            fetched.append((chunk, slot, host, copies.copy_out(host, chunk, slot.free)))

    copies.begin(chunks[0])
    try:
        fetch(count)
        while fetched:
            chunk, slot, host, copied = fetched.popleft()
            copied.synchronize()
            with part("exchange", EXCHANGE, bytes=host.nbytes):
                exchange(host)
            slot.free = copies.copy_back(chunk, host)
            fetch(1)  # into the same slot, when it is copied back
    finally:
        copies.end()
