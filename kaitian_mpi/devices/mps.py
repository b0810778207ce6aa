"""Apple GPUs: torch's own module `torch.mps`, without a vendor's library.

Sources: PyTorch's `torch/mps/__init__.py` and `torch/mps/event.py`, its documentation of
`torch.mps`, and `aten/src/ATen/native/mps/operations/Copy.mm` (what a copy waits for).

There is one GPU, with one stream that all threads share, and no float64. Its memory is the host's,
but torch copies between the two as for other devices.
"""

from __future__ import annotations

import psutil
import torch

from kaitian_mpi.devices.accelerator import Accelerator, EventMark


class MpsDevice(Accelerator):
    """The GPU of an Apple processor. Its ranks communicate through host memory."""

    kind = "mps"
    torch_type = "mps"

    def count(self) -> int:
        """Return 1 if torch can use the GPU, else 0."""
        return int(torch.backends.mps.is_available())

    def select(self, index: int) -> None:
        """Do nothing: there is only one."""

    def synchronize(self, index: int) -> None:
        """Wait for the stream."""
        torch.mps.synchronize()

    def name(self, index: int) -> str:
        """Return a name; torch does not know the processor's."""
        return "Apple GPU"

    def physical_id(self, index: int) -> str:
        """Return the same for every process: there is only one."""
        return "mps"

    def library_id(self, index: int) -> str:
        """Return "": there is no vendor's library."""
        return ""

    def memory_bytes(self, index: int) -> int:
        """Return what Metal recommends to use at most."""
        return int(torch.mps.recommended_max_memory())

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        """Return the memory this process already uses, plus its part of the free memory."""
        used = int(torch.mps.driver_allocated_memory())
        free = min(self.memory_bytes(index) - used, int(psutil.virtual_memory().available))
        return used + max(0, free) // sharers

    def restart_memory_peak(self, index: int) -> None:
        """Do nothing: torch caches all memory that it has used, so the peak only grows."""

    def memory_peak_bytes(self, index: int) -> int:
        """Return what Metal has allocated for this process, torch's cache included."""
        return int(torch.mps.driver_allocated_memory())

    def release_cached_memory(self) -> None:
        """Empty the allocator's cache."""
        torch.mps.empty_cache()

    def streams(self) -> None:
        """Return None: the one stream is in order, and a blocking copy to the host waits for it."""

    def mark(self) -> EventMark:
        """Record an event on the stream."""
        return EventMark(torch.mps.event.Event(enable_timing=True))

    def random_state(self, index: int) -> torch.Tensor:
        """Return the state of the device's generator."""
        return torch.mps.get_rng_state()

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        """Set the state of the device's generator."""
        torch.mps.set_rng_state(state)
