"""The CPU; several ranks may share it, and use MPI for their collectives."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import psutil
import torch

from kaitian_mpi.devices.protocol import Device
from kaitian_mpi.runtime.system import usable_cores

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
_NEVER = 1 << 30
CGROUP = Path("/sys/fs/cgroup")


class CpuDevice(Device):
    """The host's CPU, whatever the index."""

    kind = torch_type = "cpu"
    run_on_hardware = "x86-64, by every run of the tests"
    is_host = True

    def count(self) -> int:
        """Return the number of usable cores; any number of ranks may share them."""
        return len(usable_cores())

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def select(self, index: int) -> None:
        """Make the process keep the memory it frees; there is only one CPU to select."""
        keep_freed_memory()

    def name(self, index: int) -> str:
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine()

    def memory_bytes(self, index: int) -> int:
        return int(psutil.virtual_memory().total)

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        return self.memory_peak_bytes(index) + available_bytes(CGROUP) // sharers

    def memory_peak_bytes(self, index: int) -> int:
        """Return the process's memory: it includes what was freed (`keep_freed_memory`)."""
        return int(psutil.Process().memory_info().rss)


def available_bytes(cgroup: Path) -> int:
    """Return the available memory: the host's, or less by a control group's limit (version 2)."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        statistics = (cgroup / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return free
    files = sum(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
    return min(free, max(0, limit - used + files))


def keep_freed_memory() -> None:
    """Make malloc keep freed memory: else each step pages it in (`benchmarks/memory_kept.py`)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(M_TRIM_THRESHOLD, _NEVER)
