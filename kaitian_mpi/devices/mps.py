"""Apple GPUs: torch's own `torch.mps`, without a vendor's library.

Sources: PyTorch's `torch/mps/__init__.py`, `event.py`, `ATen/native/mps/operations/Copy.mm`.
"""

from __future__ import annotations

import psutil
import torch

from kaitian_mpi.devices.accelerator import Accelerator, EventMark


class MpsDevice(Accelerator):
    """The GPU of an Apple processor, with one stream that all threads share, and no float64."""

    kind = torch_type = "mps"

    def count(self) -> int:
        return int(torch.backends.mps.is_available())

    def select(self, index: int) -> None:
        return

    def synchronize(self, index: int) -> None:
        torch.mps.synchronize()

    def name(self, index: int) -> str:
        return "Apple GPU"  # torch does not know the processor's

    def physical_id(self, index: int) -> str:
        return "mps"

    def memory_bytes(self, index: int) -> int:
        return int(torch.mps.recommended_max_memory())  # what Metal recommends to use at most

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        used = int(torch.mps.driver_allocated_memory())
        free = min(self.memory_bytes(index) - used, int(psutil.virtual_memory().available))
        return used + max(0, free) // sharers

    def restart_memory_peak(self, index: int) -> None:
        """Do nothing: torch caches all memory that it has used, so the peak only grows."""

    def memory_peak_bytes(self, index: int) -> int:
        return int(torch.mps.driver_allocated_memory())

    def streams(self) -> None:
        """Return None: the one stream is in order, and a blocking copy to the host waits for it."""

    def mark(self) -> EventMark:
        return EventMark(torch.mps.event.Event(enable_timing=True))

    def random_state(self, index: int) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state)
