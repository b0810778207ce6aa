"""A process group's relay: takes tensors through host memory, where MPI exchanges them.

While one chunk is exchanged, the next is copied out and the one before is copied back. The host
memory is a ring of equal buffers, allocated once and used again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.relay.chunking import (
    ALIGNMENT,
    COUNT,
    ChunkLengths,
    agree_on_limit,
    agree_on_pace,
)
from kaitian_mpi.distributed.relay.copies import Copies, Event, copies_of
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import SUM
from kaitian_mpi.mpi.topology import CommunicationSettings
from kaitian_mpi.observe.timeline.recorder import EXCHANGE, part

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.network.link import Link

_log = logging.getLogger(__name__)

Exchange = Callable[[torch.Tensor], None]
"""Takes a contiguous tensor in host memory and changes it in place."""

Round = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""The flat tensors of a device that are copied out, and those that are copied back."""

RoundExchange = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Takes copies of a round's tensors in host memory, and writes those that are copied back."""


class Around(Protocol):
    """The device's work around each round, on the current stream; at most `COUNT` are begun.

    The first tensor of a round that is copied out is not empty: so the host has waited for what was
    begun, and with it for the rounds that ended before, when it copies back.
    """

    def begin(self, number: int) -> None:
        """Make the values that a round copies out."""

    def end(self, number: int) -> None:
        """Use the values that a round has copied back."""


@dataclass(eq=False)
class Slot:
    """One buffer in host memory."""

    memory: torch.Tensor
    """Bytes."""
    free: Event | None = None
    """When the device has read what the last user left; None if there was none."""

    def view_as(self, chunk: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the memory from a byte on as a flat host tensor of a chunk's length and dtype."""
        return self.memory[start : start + chunk.nbytes].view(chunk.dtype)


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
    rounds = [([chunk], [chunk]) for chunk in chunks]
    exchange_in_rounds(rounds, lambda sent, _: exchange(sent[0]), copies, slots)


def exchange_in_rounds(
    rounds: Sequence[Round],
    exchange: RoundExchange,
    copies: Copies,
    slots: Slots,
    around: Around | None = None,
) -> None:
    """Apply `exchange` to copies of each round's tensors in host memory, and copy back its results.

    As `exchange_in_chunks` does. The first round has a part of all memory that others use.
    """
    begun = ended = 0
    sizes = [
        sum(_slot_bytes(tensor) for tensor in _distinct(sent, received))
        for sent, received in rounds
    ]
    slot_count = slots.provide(len(rounds), max(sizes))
    in_slots: deque[_RoundInSlot] = deque()

    def copy_out_next() -> None:
        nonlocal begun
        if begun == len(rounds):
            return
        sent, received = rounds[begun]
        if around is not None:
            around.begin(begun)
            copies.begin(sent[0])
        in_slots.append(_copy_out(sent, received, copies, slots.take()))
        begun += 1

    for tensor in _distinct(*rounds[0]):
        copies.begin(tensor)
    try:
        for _ in range(slot_count):
            copy_out_next()
        while in_slots:
            current = in_slots.popleft()
            current.wait()
            sent_hosts = current.hosts_of(current.sent)
            with part("exchange", EXCHANGE, bytes=sum(host.nbytes for host in sent_hosts)):
                exchange(sent_hosts, current.hosts_of(current.received))
            current.copy_back(copies)
            if around is not None:
                copies.end()
                around.end(ended)
                ended += 1
            copy_out_next()  # into the same slot, when it is copied back
    finally:
        copies.end()


class _RoundInSlot(NamedTuple):
    """A round whose tensors are being copied out to a slot."""

    sent: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]
    slot: Slot
    hosts: dict[int, torch.Tensor]
    """The memory in the slot of each tensor, by its `id`."""
    ends: list[Event]
    """Of the copies, which come one after the other."""

    def wait(self) -> None:
        """Wait until the host may read what is sent, and write what is received."""
        if self.ends:
            self.ends[-1].synchronize()
        elif self.slot.free is not None:
            self.slot.free.synchronize()

    def hosts_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the memory in the slot of these tensors."""
        return [self.hosts[id(tensor)] for tensor in tensors]

    def copy_back(self, copies: Copies) -> None:
        """Start to copy back what was received, after which the slot is free."""
        for tensor in self.received:
            if tensor.numel():
                self.slot.free = copies.copy_back(tensor, self.hosts[id(tensor)])


def _copy_out(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], copies: Copies, slot: Slot
) -> _RoundInSlot:
    """Start to copy out what a round sends, to a slot with memory for all of its tensors."""
    start = 0
    hosts: dict[int, torch.Tensor] = {}
    for tensor in _distinct(sent, received):
        hosts[id(tensor)] = slot.view_as(tensor, start)
        start += _slot_bytes(tensor)
    full = [tensor for tensor in _distinct(sent) if tensor.numel()]
    ends = [copies.copy_out(hosts[id(tensor)], tensor, slot.free) for tensor in full]
    return _RoundInSlot(sent, received, slot, hosts, ends)


def _distinct(*lists: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*{id(tensor): tensor for tensors in lists for tensor in tensors}.values()]


def _slot_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in a slot, so that the next one is aligned."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


class Relay:
    """The relay of one process group: its streams and buffers by device, and its pace.

    Used by one thread at a time. The memory is bounded per process group: see `Slots`.
    """

    def __init__(
        self,
        settings: CommunicationSettings,
        device: torch.device,
        links: Mapping[int, Link],
        has_accelerators: bool,
    ) -> None:
        """Allocate nothing yet; `links` are those between hosts, by communicator.

        If no rank of the group has an accelerator, tensors are cut as suits MPI alone.
        """
        self.settings = settings
        self.has_accelerators = has_accelerators
        self._device = device
        self._links = links
        self._paths: dict[torch.device, tuple[Copies, Slots]] = {}
        # By a communicator and the memory's size.
        self._limits: dict[tuple[int, int], int] = {}
        self._paces: dict[tuple[int, int], ChunkLengths] = {}

    def exchange(
        self,
        comm: MPI.Comm,
        tensor: torch.Tensor,
        exchange: Exchange,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Apply `exchange` to a flat contiguous tensor, in place, in chunks. Collective.

        The chunks are the same on every rank: they depend on the tensor's length and dtype and on
        what the ranks have agreed on, not on where a rank's tensor is.
        """
        crossing = tensor if dtype is None else tensor.to(dtype)
        chunks = self.split(comm, crossing)
        device = crossing.device
        if crossing.is_cpu:
            for chunk in chunks:
                with part("exchange", EXCHANGE, bytes=chunk.nbytes):
                    exchange(chunk)
        else:
            exchange_in_chunks(chunks, exchange, *self._path(device))
        if crossing is not tensor:
            tensor.copy_(crossing)

    def exchange_in_rounds(
        self, rounds: Sequence[Round], exchange: RoundExchange, around: Around | None = None
    ) -> None:
        """Apply `exchange` to each round's tensors, all of which are on one device."""
        if not rounds:
            return
        device = _distinct(*rounds[0])[0].device
        if not device_of(device).is_host:
            exchange_in_rounds(rounds, exchange, *self._path(device), around)
            return
        for number, (sent, received) in enumerate(rounds):
            if around is not None:
                around.begin(number)
            exchange(sent, received)
            if around is not None:
                around.end(number)

    def _path(self, device: torch.device) -> tuple[Copies, Slots]:
        if device not in self._paths:
            self._paths[device] = copies_of(device), Slots(pins=device_of(device).pins_memory)
        return self._paths[device]

    def split(self, comm: MPI.Comm, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the chunks of a flat tensor. Collective over `comm` the first time."""
        if not self.has_accelerators and comm.py2f() in self._links:
            return (tensor,)  # which the network cuts itself
        if not self.has_accelerators or comm.size == 1:
            return host_collectives.allreduce_chunks(comm, tensor)
        size = tensor.element_size()
        return tensor.split([length // size for length in self._pace(comm).lengths(tensor.nbytes)])

    def longest_chunk(self, comm: MPI.Comm) -> int:
        """Return the bytes of a chunk that fits every rank. Collective over `comm` at first."""
        key = comm.py2f(), self.settings.relay_memory_mb
        if key not in self._limits:
            self._limits[key] = agree_on_limit(comm, key[1])
            for _, slots in self._paths.values():
                slots.free_above(self._limits[key])
        return self._limits[key]

    def _pace(self, comm: MPI.Comm) -> ChunkLengths:
        key = comm.py2f(), self.settings.relay_memory_mb
        if key not in self._paces:
            limit = self.longest_chunk(comm)
            self._paces[key] = agree_on_pace(comm, limit, lambda size: self._stages(comm, size))
        return self._paces[key]

    def _stages(self, comm: MPI.Comm, size: int) -> list[Callable[[], None]]:
        """Return the stages of a chunk of `size` bytes on this rank's device, to be timed."""
        host = torch.zeros(size // 4)
        link = self._links.get(comm.py2f())
        allreduce = link.reduce_to_all if link else partial(host_collectives.allreduce, comm)
        chunk = torch.zeros(size // 4, device=self._device)
        if chunk.is_cpu:
            return [lambda: allreduce(host, SUM)]
        copies = copies_of(self._device)
        slots = Slots(pins=device_of(self._device).pins_memory)
        slots.provide(1, size)
        pinned = slots.take().view_as(chunk)
        copies.begin(chunk)

        def exchange() -> None:
            copies.copy_out(pinned, chunk, None)  # which the host only starts
            allreduce(host, SUM)
            copies.copy_back(chunk, pinned)

        return [
            exchange,
            lambda: copies.copy_out(pinned, chunk, None).synchronize(),
            lambda: copies.copy_back(chunk, pinned).synchronize(),
        ]
