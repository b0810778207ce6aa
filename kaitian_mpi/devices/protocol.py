"""What the package asks of a device kind."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class Mark(Protocol):
    """A point in what a device has been given to do, with the time at which it gets there."""

    def is_reached(self) -> bool:
        """Return whether the device has done all that was given to it before."""
        ...

    def wait(self) -> None:
        """Block until the device has."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark of the same kind to this one.

        Both must have been reached.
        """
        ...


class Device(Protocol):
    """One kind of device as one process sees it, and all that is particular to it.

    No other module asks what kind a device is. A vendor's torch plug-in, where it is imported at
    all, is imported inside the methods, so that a machine without it can still list the kind.

    `Accelerator` in `devices/accelerator.py` answers nearly all of it for a vendor whose torch
    module is like `torch.cuda`.

    An `index` counts the kind's devices on this host from 0, as in `--devices cuda:1`.
    """

    kind: str
    """The kind's name, as in `--devices cuda:0`: lower-case letters, digits and underscores."""

    torch_type: str
    """The type of its torch devices, such as `cuda`. Several kinds may have the same."""

    vendor_backend: str | None
    """Name of the torch.distributed backend that joins devices of this kind, such as `nccl`;
    None where MPI itself reaches their memory."""

    is_host: bool
    """Whether it is the host's own processor: its memory is the host's, its calls return when the
    work is done, and the work is done by the calling thread."""

    pins_memory: bool
    """Whether torch can page-lock host memory for copies to and from the device, which then go on
    beside other work."""

    orders_futures: bool
    """Whether `torch.futures.Future`, which is C++, knows the device's streams, and makes a
    waiter's stream wait for the writer's. Otherwise the writer's is waited for by the host."""

    def vendor_takes(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether the vendor's library moves tensors of a type, or reduces them.

        The ranks take the same way by it, so it is a fact about the library alone.

        Args:
            dtype: the tensors' type.
            reduction: a name in `torch.distributed.ReduceOp`, such as `AVG`; None to move them.
        """
        ...

    def join_vendor_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return the vendor's process group, one of `vendor_backend`, of some ranks. Collective.

        Args:
            store: a store of the group's own, for the library's bootstrap.
            rank: this rank in the group.
            size: how many ranks the group has.
            timeout: how long one collective may take.
        """
        ...

    def count(self) -> int:
        """Return how many devices of this kind the process can use; 0 if there are none."""
        ...

    def torch_device(self, index: int) -> torch.device:
        """Return the torch device with this index."""
        ...

    def select(self, index: int) -> None:
        """Make this device the process's current one."""
        ...

    def synchronize(self, index: int) -> None:
        """Wait until all work given to the device is done."""
        ...

    def name(self, index: int) -> str:
        """Return the device's marketing name."""
        ...

    def memory_bytes(self, index: int) -> int:
        """Return the memory this process may use, in bytes."""
        ...

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        """Return how much memory this process may come to use without harming others, in bytes.

        Args:
            index: the device.
            sharers: processes of this job that take their memory from the same place, this one
                included; each gets an equal part of what is free.
        """
        ...

    def restart_memory_peak(self, index: int) -> None:
        """Begin a new measurement of the peak, where the device can."""
        ...

    def memory_peak_bytes(self, index: int) -> int:
        """Return the most memory that this process has used at once since `restart_memory_peak`."""
        ...

    def release_cached_memory(self) -> None:
        """Give back the memory that torch's allocator keeps for later."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception says that memory ran out, the device's or the host's."""
        ...

    def streams(self) -> Any | None:
        """Return a module with streams; None where calls return when the work is done.

        It has `Stream`, `Event`, `stream` and `current_stream`, as `torch.cuda` has them.
        """
        ...

    def mark(self) -> Mark:
        """Mark this point of the calling thread's current stream."""
        ...

    def random_state(self, index: int) -> torch.Tensor | None:
        """Return the state of the device's random numbers; None where they are the host's."""
        ...

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        """Set what `random_state` returned."""
        ...
