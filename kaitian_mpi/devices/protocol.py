"""The base class of device kinds: the interface that the package requires, and plain defaults."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from kaitian_mpi.devices.pace import CallPace, Pace

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_OUT_OF_HOST_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",  # Linux, macOS
    "DefaultCPUAllocator: not enough memory",
    "could not create a memory object",  # oneDNN
)


class Mark(Protocol):
    """A point in a device's work, with the time at which the device reaches it."""

    def is_reached(self) -> bool:
        """Return whether the device has done all work submitted before the mark."""
        ...

    def wait(self) -> None:
        """Block until the device has done it."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark of the same kind to this one.

        Both must have been reached.
        """
        ...


class HostMark:
    """The time of a call, when all earlier calls were done."""

    def __init__(self) -> None:
        self._sec = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: HostMark) -> float:
        return self._sec - earlier._sec


class Device:
    """One kind of device as seen by one process, and everything specific to it.

    Other modules never check what kind a device is. A vendor's torch plug-in, if it has to be
    imported at all, is imported inside the methods, so that a machine without it can list the kind.
    The defaults are those of a device without a vendor's library whose calls do the work before
    they return. `Accelerator` has nearly all for vendors whose torch module is like `torch.cuda`.

    An `index` counts the kind's devices on this host from 0, as in `--devices cuda:1`.
    """

    kind: str
    """The kind's name, as in `--devices cuda:0`: lower-case letters, digits and underscores."""

    torch_type: str
    """The type of its torch devices, such as `cuda`. Several kinds may have the same."""

    vendor_backend: str | None = None
    """Name of the torch.distributed backend for devices of this kind, such as `nccl`; None if
    MPI in host memory is used."""

    library = ""
    """The vendor's name for that backend's library, such as `NCCL`; empty without one."""

    vendor_lacks: frozenset[str] = frozenset()
    """Collectives that the vendor's library does not have, by their names in profiles, such as
    `gather`: they use host memory."""

    plugin = ""
    """The package that makes torch know the device type, such as `torch_npu`; empty if a build of
    torch itself does."""

    is_host = False
    """Whether it is the host's CPU: it uses host memory, and its calls do the work in the calling
    thread before they return."""

    pins_memory = False
    """Whether torch can page-lock host memory for the device, so that copies are asynchronous."""

    futures_handle_streams = False
    """Whether `torch.futures.Future` handles the device's streams: it makes a waiter's stream wait
    for the writer's. Otherwise the host waits for the writer's stream."""

    pace = Pace()
    """How fast the steps of a `Training` are, if not as fast as the device is."""

    calls = CallPace()
    """The same for a script's own loop."""

    run_on_hardware = ""
    """On what the kind has been run, such as `NVIDIA H100, 2026-11-22`; empty: not on hardware."""

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether the vendor's library can move or reduce tensors of a dtype.

        All ranks must reach the same decision, so it may depend on its arguments only.

        Args:
            dtype: the tensors' dtype.
            reduction: a name in `torch.distributed.ReduceOp`, such as `AVG`; None to move them.
        """
        return False

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return a process group of `vendor_backend` over some ranks. Collective over them.

        Args:
            store: a store for this group alone, for the library's bootstrap.
            rank: this rank in the group.
            size: the group's number of ranks.
            timeout: how long one collective may take.
        """
        raise NotImplementedError

    def leave_losses_to_caller(self) -> list[str]:
        """Have the vendor's backend not end the process itself when a rank of a group is lost.

        Called before the first group is created, where a job is to survive the loss of ranks.

        Returns:
            What stands in the way, as text for warnings: settings of the user's.
        """
        return []

    def abort_vendor_group(self, group: Any) -> None:
        """End what the device does for a group, and release it, without its other ranks.

        May be called while other threads wait for the device, or call the group.
        """
        group.abort()

    def count(self) -> int:
        """Return how many devices of this kind the process can use; 0 if there are none.

        Raises:
            KindError: the kind is installed, but cannot open its devices.
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
        """Return what identifies the physical device on its host, whatever its index; "" for a CPU.

        Two processes may see one device by different indices, and different devices by the same
        index, because each can have its own variable such as `CUDA_VISIBLE_DEVICES`. Two ranks of a
        group with a library and one device are refused.
        """
        return ""

    def memory_bytes(self, index: int) -> int:
        """Return the memory this process may use, in bytes."""
        raise NotImplementedError

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        """Return how much memory this process may use in total, in bytes.

        Args:
            index: the device.
            sharers: the number of processes of this job that share the memory, including this one;
                each gets an equal part of what is free.
        """
        raise NotImplementedError

    def restart_memory_peak(self, index: int) -> None:
        """Start a new measurement of the memory peak, if the device supports it."""

    def memory_peak_bytes(self, index: int) -> int:
        """Return the most memory that this process has used at once since `restart_memory_peak`."""
        raise NotImplementedError

    def release_cached_memory(self) -> None:
        """Release the unused memory that torch's allocator caches."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that the device or the host is out of memory."""
        import torch

        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        is_torch = isinstance(error, RuntimeError)
        return is_torch and any(map(str(error).__contains__, _OUT_OF_HOST_MEMORY))

    def streams(self) -> Any | None:
        """Return a module with streams; None if calls return when the work is done.

        It has `Stream`, `Event`, `stream` and `current_stream`, like `torch.cuda`.
        """
        return None

    def keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep a tensor's memory until a stream has done what it is given up to the next call."""

    def mark(self) -> Mark:
        """Mark this point of the calling thread's current stream."""
        return HostMark()

    def random_state(self, index: int) -> torch.Tensor | None:
        """Return the state of the device's random number generator; None if it has none."""
        return None

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        """Restore a state that `random_state` returned."""
