"""What the package asks of a device kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """One kind of device as one process sees it.

    A vendor's torch plug-in is imported inside the methods, never at module level, so that a
    machine without it can still list the kind.
    """

    kind: str
    """The kind's name, as in `--devices cuda:0`."""

    vendor_backend: str | None
    """Name of the torch.distributed backend that joins devices of this kind, such as `nccl`;
    None where MPI itself reaches their memory."""

    def vendor_takes(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether the vendor's library moves tensors of a type, or reduces them.

        The ranks take the same way by it, so it is a fact about the library alone.

        Args:
            dtype: the tensors' type.
            reduction: a name in `torch.distributed.ReduceOp`, such as `AVG`; None to move them.
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
        """Return how much memory this process may come to use without harming others.

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
