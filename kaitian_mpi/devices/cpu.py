"""The host's own processor; several ranks may share it."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import psutil
import torch

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
_NEVER = 1 << 30


class CpuDevice:
    """The host's processor. Collectives among CPU ranks are MPI's own."""

    kind = "cpu"
    vendor_backend = None

    def count(self) -> int:
        """Return one place per core, at least one: any number of ranks may share a host."""
        return max(1, len(os.sched_getaffinity(0)))

    def torch_device(self, index: int) -> torch.device:
        """Return `cpu`; there is only one, whatever the index."""
        return torch.device("cpu")

    def select(self, index: int) -> None:
        """Make the process keep the memory it frees; there is only one CPU to select."""
        keep_freed_memory()

    def synchronize(self, index: int) -> None:
        """Do nothing: CPU calls return when done."""

    def name(self, index: int) -> str:
        """Return the processor's model name."""
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine()

    def memory_bytes(self, index: int) -> int:
        """Return the host's memory in bytes; its ranks share it."""
        return int(psutil.virtual_memory().total)


def keep_freed_memory() -> None:
    """Let the process keep the memory it frees, up to its peak, instead of returning it.

    A training step frees and takes the same large blocks again and again; given back to the kernel
    each time, they cost a page fault for every 4 KiB. `benchmarks/memory_kept.py` measures it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(M_TRIM_THRESHOLD, _NEVER)
