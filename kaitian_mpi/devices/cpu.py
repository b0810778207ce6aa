"""The CPU; several ranks may share it, and use MPI for their collectives."""

from __future__ import annotations

import ctypes
import math
import platform
from functools import cache
from pathlib import Path

import psutil
import torch

from kaitian_mpi.devices.protocol import Device
from kaitian_mpi.runtime.system import usable_cores

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
_NEVER = 1 << 30
_LARGE_BYTES = 1 << 16
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
        _keep_freed_memory_once()

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
        return self.memory_peak_bytes(index) + available_bytes() // sharers

    def memory_peak_bytes(self, index: int) -> int:
        """Return the process's memory: it includes what was freed (`keep_freed_memory`)."""
        return int(psutil.Process().memory_info().rss)

    def return_freed_memory(self) -> None:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def return_large_blocks(self) -> None:
        _set_malloc(M_MMAP_THRESHOLD, _LARGE_BYTES)


def available_bytes(root: Path = CGROUP, process_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Return the available bytes: the host's, or fewer by a control group's limit (version 2).

    Each of this process's groups may have a limit, such as Slurm's for the job and for the step.
    """
    free = int(psutil.virtual_memory().available)
    try:
        lines = process_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    innermost = root / next(names, "")
    groups = [innermost, *innermost.parents]
    remaining = [_remaining_bytes(group) for group in groups if group.is_relative_to(root)]
    return int(min(free, *remaining))


def _remaining_bytes(group: Path) -> float:
    """Return the bytes that a control group may still allocate."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = (group / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return math.inf
    files = sum(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
    return max(0, limit - used + files)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, so that no step pages it in (benchmarks/memory_kept.py)."""
    _set_malloc(M_MMAP_THRESHOLD, _NEVER)
    _set_malloc(M_TRIM_THRESHOLD, _NEVER)


def _set_malloc(option: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(option, value)


@cache
def _keep_freed_memory_once() -> None:
    """Leave it to a limit of memory to change that later, whichever threads then select the CPU."""
    keep_freed_memory()
