"""The base class of device kinds: the interface that the package requires, and plain defaults."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kaitian_mpi.devices.pace import CallPace, Pace

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_OUT_OF_HOST_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",  # Linux, macOS
    "DefaultCPUAllocator: not enough memory",
    "could not create a memory object",  # oneDNN
    "std::bad_alloc",
)


class Mark:
    """A point in a device's work; this one is for a device whose calls return when done."""

    def __init__(self) -> None:
        self._sec = time.perf_counter()

    def is_reached(self) -> bool:
        """Return whether the device has done all work submitted before the mark."""
        return True

    def wait(self) -> None:
        """Block until the device has reached the mark."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark to this one; both have been reached."""
        return float(self._sec - earlier._sec)


def event_to_wait_for(streams: Any, **options: Any) -> Any:
    """Return an event on which the host sleeps instead of spinning, if the device supports it."""
    try:
        return streams.Event(blocking=True, **options)
    except TypeError:  # for example torch.xpu's
        return streams.Event(**options)


class Device:
    """One kind of device as seen by one process, and everything specific to it.

    A vendor's torch plug-in is imported inside the methods, so that a machine without it can list
    the kind. The defaults are those of a device whose calls do the work before they return. An
    `index` counts the kind's devices on this host from 0, as in `--devices cuda:1`.
    """

    kind: str
    """The kind's name, as in `--devices cuda:0`: lower-case letters, digits and underscores."""

    torch_type: str
    """The type of its torch devices, such as `cuda`; several kinds may share one."""

    vendor_backend: str | None = None
    """Its torch.distributed backend, such as `nccl`; None if MPI in host memory is used."""

    library = ""
    """The vendor's name for that backend's library, such as `NCCL`; empty without one."""

    vendor_lacks: frozenset[str] = frozenset()
    """Collectives that the vendor's library lacks, such as `gather`: they use host memory."""

    plugin = ""
    """The package by which torch knows the device type, such as `torch_npu`; empty without one."""

    is_host = False
    """Whether it is the host's CPU, whose calls do the work before they return."""

    pins_memory = False
    """Whether torch can page-lock host memory for the device, so that copies are asynchronous."""

    futures_handle_streams = False
    """Whether `torch.futures.Future` makes a waiter's stream wait, not the host."""

    pace = Pace()
    """The emulated pace of a `Training`'s steps."""

    calls = CallPace()
    """The emulated pace of a script's own loop."""

    run_on_hardware = ""
    """The hardware the kind has been run on, such as `NVIDIA H100, 2026-11-22`; empty if none."""

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether the vendor's library can move (None) or reduce (as `AVG`) a dtype.

        All ranks must reach the same decision, so it may depend on its arguments only.
        """
        return False

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return a `vendor_backend` group; the store is its own. Collective over its ranks."""
        raise NotImplementedError

    def missing_library(self) -> str:
        """Return why this process lacks the vendor's library; "" if it has it, or needs none.

        Then the ranks of its group communicate through host memory.
        """
        return ""

    def usable_library(self) -> str:
        """Return the name of the vendor's library that this process has; "" without one."""
        return "" if self.missing_library() else self.library or self.vendor_backend or ""

    def leave_losses_to_caller(self) -> list[str]:
        """Keep the vendor's backend from ending the process if a rank is lost; return warnings."""
        return []

    def abort_vendor_group(self, group: Any) -> None:
        """End and release a group without its other ranks, even while other threads wait for it."""
        group.abort()

    def count(self) -> int:
        """Return the number of devices that the process can use.

        Raises:
            KindError: it cannot open them.
        """
        raise NotImplementedError

    def torch_device(self, index: int) -> torch.device:
        """Return the torch device with this index."""
        import torch  # late: the commands load this module before they check their flags

        return torch.device(self.torch_type, index)

    def select(self, index: int) -> None:
        """Make this device the process's current one."""

    def synchronize(self, index: int) -> None:
        """Wait until the device has done all its work."""

    def name(self, index: int) -> str:
        """Return the device's marketing name."""
        return self.kind

    def physical_id(self, index: int) -> str:
        """Return an ID of the physical device that is unique on its host.

        Two ranks of a group with a library and one device are refused. Empty for a CPU.
        """
        return ""

    def memory_bytes(self, index: int) -> int:
        """Return the memory this process may use, in bytes."""
        raise NotImplementedError

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        """Return the bytes that this process may use, if `sharers` ranks share the free memory."""
        raise NotImplementedError

    def restart_memory_peak(self, index: int) -> None:
        """Start a new measurement of the memory peak, if the device supports it."""

    def memory_peak_bytes(self, index: int) -> int:
        """Return the peak of this process's memory since `restart_memory_peak`, in bytes."""
        raise NotImplementedError

    def tensor_bytes(self, index: int) -> tuple[int, int]:
        """Return the bytes of tensors on the device, and the most since `restart_memory_peak`.

        Both are 0 if the device does not count them.
        """
        return 0, 0

    def release_cached_memory(self) -> None:
        """Release the unused memory that torch's allocator caches."""

    def return_freed_memory(self) -> None:
        """Return freed memory to the operating system once; the next allocations are slower."""

    def return_large_blocks(self) -> None:
        """Return large blocks to the operating system when they are freed, from now on.

        So there are no gaps between those in use: the process has what its tensors take. Each
        allocation of a large block is slower.
        """

    def grow_segments(self) -> None:
        """Let the segments of torch's allocator grow in place, so that no gaps remain.

        Does nothing if the user has set the allocator's options, or it cannot do so.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that the device or the host is out of memory."""
        import torch

        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        is_torch = isinstance(error, RuntimeError)
        return is_torch and any(map(str(error).__contains__, _OUT_OF_HOST_MEMORY))

    def streams(self) -> Any | None:
        """Return a module with streams, such as `torch.cuda`; None if calls return when done."""
        return None

    def keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep a tensor's memory until a stream has finished its work up to the next call."""

    def mark(self) -> Mark:
        """Return a mark at this point of the calling thread's current stream."""
        return Mark()

    def random_state(self, index: int) -> torch.Tensor | None:
        """Return the state of the device's random number generator; None if it has none."""
        return None

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        """Restore a state that `random_state` returned."""
