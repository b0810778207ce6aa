"""The emulated device's memory: an allocator with a cache and a limit, as torch's for CUDA has.

Contract: pytorch/pytorch, `c10/cuda/CUDACachingAllocator.cpp`. A block that is freed stays
reserved, for later tensors of the same stream, at once: what that stream does with it comes later.
Where other streams were recorded, it waits until they are done with it (`record_stream`,
`process_events`). Memory is overwritten as soon as it may be used again. If there is too little,
the cache is given back, which waits for the device; if that does not help, an error of torch's
tells of it.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field

from . import streams
from .streams import Event, Stream, contexts, current_stream, index_of, stream_of

GARBAGE = 0xAB
CAPACITY_BYTES = 1 << 32
CONTEXT_BYTES = 64 << 20
"""What a context takes of a device's memory, on each device that the process touches."""
_SMALL_BYTES, _SMALL_STEP, _LARGE_STEP = 1 << 20, 512, 2 << 20

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)


@dataclass(eq=False)
class Block:
    """A piece of the device's memory, which tensors use one after the other."""

    address: int
    nbytes: int
    owner: Stream
    """The stream that was current when it was allocated."""
    wanted_bytes: int = 0
    recorded: list[Stream] = field(default_factory=list)
    """The other streams that use it."""


class DeviceMemory:
    """The memory of one device."""

    def __init__(self, index: int) -> None:
        self.capacity_bytes = CAPACITY_BYTES
        self.fraction = 1.0
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.cached: list[Block] = []
        self._pending: list[tuple[Block, list[Event]]] = []
        self._index = index
        # The collector may free tensors while one is allocated.
        self._lock = threading.RLock()

    def limit(self) -> int:
        """Return how many bytes of tensors fit, beside the context."""
        given = int(self.capacity_bytes * self.fraction)
        return given - CONTEXT_BYTES * (self._index in contexts)

    def allocate(self, wanted: int) -> int:
        """Return an address; 0 if there is too little memory."""
        step = _SMALL_STEP if wanted <= _SMALL_BYTES else _LARGE_STEP
        nbytes = -(-wanted // step) * step
        contexts.add(self._index)
        owner = current_stream(self._index)
        with self._lock:
            block = self._from_cache(owner, nbytes)
        if block is None and self.reserved + nbytes > self.limit():
            self.release_cache()
        with self._lock:
            if block is None and self.reserved + nbytes > self.limit():
                return 0
            if block is None:
                block = Block(_libc.malloc(nbytes), nbytes, owner)
                self.reserved += nbytes
                self.peak_reserved = max(self.peak_reserved, self.reserved)
            block.wanted_bytes = wanted
            self.allocated += nbytes
            self.peak_allocated = max(self.peak_allocated, self.allocated)
            blocks[block.address] = block
        return block.address

    def _from_cache(self, owner: Stream, nbytes: int) -> Block | None:
        self._process_events()
        most = nbytes + max(nbytes // 4, _SMALL_STEP)
        fits = [b for b in self.cached if b.owner == owner and nbytes <= b.nbytes <= most]
        block = min(fits, key=lambda b: b.nbytes, default=None)
        if block is not None:
            self.cached.remove(block)
        return block

    def free(self, block: Block) -> None:
        with self._lock:
            self.allocated -= block.nbytes
            if block.recorded:
                entry = block, [Event(each) for each in block.recorded]
                block.recorded = []
                self._pending.append(entry)
                self._process_events()
            else:
                self._use_again(block)

    def _process_events(self) -> None:
        # Looking at an event, or the collector, may free more tensors, which comes here again. So
        # nothing is made between reading a list and changing it: a block must not be there twice.
        left: list[tuple[Block, list[Event]]] = []
        pending, self._pending = self._pending, left
        for entry in pending:
            block, events = entry
            if all(event.query() for event in events):
                self._use_again(block)
            else:
                self._pending.append(entry)

    def _use_again(self, block: Block) -> None:
        address, nbytes = block.address, block.wanted_bytes
        block.owner.give(lambda: ctypes.memset(address, GARBAGE, nbytes) and None)
        self.cached.append(block)

    def release_cache(self) -> None:
        """Give back what no tensor uses; waits for the device."""
        streams.finish(self._index)
        with self._lock:
            self._process_events()
            freed, self.cached = self.cached, []
            self.reserved -= sum(block.nbytes for block in freed)
        streams.finish(self._index)  # with the garbage
        for block in freed:
            _libc.free(block.address)


blocks: dict[int, Block] = {}
"""Those of tensors, by address."""

memories = [DeviceMemory(index) for index in range(8)]  # `kDevices` of device.cpp


def allocate(nbytes: int, device: int) -> int:
    return memories[device].allocate(nbytes)


def release(address: int) -> None:
    block = blocks.pop(address)
    memories[block.owner.device_index].free(block)


def record_memory(address: int, number: int, device: int) -> None:
    """Let a block's memory not be used again before a stream is done with it."""
    block, chosen = blocks.get(address), stream_of(device, number)
    if block is not None and chosen != block.owner:
        block.recorded.append(chosen)


def set_limit(nbytes: int = CAPACITY_BYTES, device: object = None) -> None:
    """Give a device so much memory, with what its context takes."""
    memories[index_of(device)].capacity_bytes = nbytes


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    memories[index_of(device)].fraction = fraction


def memory_allocated(device: object = None) -> int:
    return memories[index_of(device)].allocated


def memory_reserved(device: object = None) -> int:
    return memories[index_of(device)].reserved


def max_memory_allocated(device: object = None) -> int:
    return memories[index_of(device)].peak_allocated


def max_memory_reserved(device: object = None) -> int:
    return memories[index_of(device)].peak_reserved


def reset_peak_memory_stats(device: object = None) -> None:
    memory = memories[index_of(device)]
    memory.peak_allocated, memory.peak_reserved = memory.allocated, memory.reserved


def empty_cache() -> None:
    for memory in memories:
        memory.release_cache()


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return how many bytes are free, and how many there are."""
    memory = memories[index_of(device)]
    used = memory.reserved + CONTEXT_BYTES * (memory._index in contexts)
    return memory.capacity_bytes - used, memory.capacity_bytes
