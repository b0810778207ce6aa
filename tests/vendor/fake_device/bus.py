"""The bus between the emulated device and the host: a copy engine for each direction.

A copy takes its time, during which neither other copies in the other direction nor other work are
delayed. It reads and writes memory at its end, so that whoever does not wait for it sees old
values. Memory that is not page-locked is copied at a fraction of the speed: NVIDIA's "CUDA C++ Best
Practices Guide", "Pinned Memory".
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch

from .extension import library
from .streams import LATE_SEC, sleep_until

COPY = torch.ops.aten.copy_.default
PAGEABLE_SLOWDOWN = 4


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor in host memory is page-locked."""
    return bool(library.fake_is_pinned(tensor.data_ptr()))


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on a stream's thread, which is in no inference mode, whatever tensors were made in."""
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        COPY(target, source)


class CopyEngine:
    """Copies between the host and the accelerator in one direction, one after the other."""

    def __init__(self) -> None:
        self.bytes_per_sec = float("inf")
        self.moves_data = True
        """Whether the processor copies the data. A real engine needs no processor, so where both of
        this host's cores are busy, timing is truer without."""
        self._turn = threading.Lock()
        self._free_at = 0.0
        self._sec_per_byte = 0.0  # of the processor's own copy, which is part of the time

    def book(self, ready_at: float, nbytes: int) -> float:
        """Let a copy without data follow those before it; return when it ends."""
        with self._turn:
            self._free_at = max(self._free_at, ready_at) + nbytes / self.bytes_per_sec
            return self._free_at

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.bytes_per_sec == float("inf"):
            move(target, source)
            return
        slowdown = 1 if is_pinned(target) or is_pinned(source) else PAGEABLE_SLOWDOWN
        with self._turn:
            # What follows another copy begins at its end, even if this thread woke up late.
            began = max(self._free_at, time.perf_counter() - LATE_SEC)
            self._free_at = began + slowdown * source.nbytes / self.bytes_per_sec
            processor_sec = source.nbytes * self._sec_per_byte * self.moves_data
            time.sleep(max(0.0, self._free_at - processor_sec - time.perf_counter()))
            awake_at = time.perf_counter()
            if not self.moves_data:
                return
            move(target, source)
            self._sec_per_byte = (time.perf_counter() - awake_at) / max(1, source.nbytes)
            sleep_until(self._free_at)  # this copy was faster than the last one, say on a busy core


def set_bandwidth(out: float = float("inf"), back: float | None = None) -> None:
    """Set how many bytes a second the bus moves to the host, and back (None: as many)."""
    engines["out"].bytes_per_sec = out
    engines["back"].bytes_per_sec = out if back is None else back


engines = {"out": CopyEngine(), "back": CopyEngine()}
"""The bus: from the accelerator to the host, and back."""
