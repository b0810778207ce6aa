"""The relay's pipeline: neighbouring chunks are copied out, exchanged and copied back at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from kaitian_mpi.distributed.relay.copies import Copies, Event
from kaitian_mpi.distributed.relay.slots import Slot, Slots

Exchange = Callable[[torch.Tensor], None]
"""Takes a contiguous tensor in host memory and changes it in place."""


class _Fetched(NamedTuple):
    chunk: torch.Tensor
    slot: Slot
    host: torch.Tensor
    copied: Event


def exchange_in_chunks(
    chunks: Sequence[torch.Tensor], exchange: Exchange, copies: Copies, slots: Slots
) -> None:
    """Apply `exchange` to a copy of each chunk in host memory, in order, and copy it back.

    Returns when the last copy back is queued: later work on the current stream comes after it. If
    `exchange` raises, the chunks so far are copied back.

    Args:
        chunks: flat contiguous parts of one tensor.
        exchange: works on one chunk in host memory.
        copies: copies to and from the device.
        slots: the host memory.
    """
    count = slots.provide(len(chunks), max(chunk.nbytes for chunk in chunks))
    waiting = iter(chunks)
    fetched: deque[_Fetched] = deque()

    def fetch(number: int) -> None:
        for chunk in islice(waiting, number):
            slot = slots.take()
            host = slot.view_as(chunk)
            fetched.append(_Fetched(chunk, slot, host, copies.copy_out(host, chunk, slot.free)))

    copies.begin(chunks[0])
    try:
        fetch(count)
        while fetched:
            chunk, slot, host, copied = fetched.popleft()
            copied.synchronize()
            exchange(host)
            slot.free = copies.copy_back(chunk, host)
            fetch(1)  # into the same slot, when it is copied back
    finally:
        copies.end()
