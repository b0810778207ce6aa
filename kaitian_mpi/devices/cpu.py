"""The CPU; several ranks may share it."""

from __future__ import annotations

import ctypes
import platform
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from kaitian_mpi.devices.pace import CallPace, Pace
from kaitian_mpi.runtime.system import usable_cores

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
_NEVER = 1 << 30
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",  # Linux, macOS
    "DefaultCPUAllocator: not enough memory",
    "could not create a memory object",  # oneDNN
)
CGROUP = Path("/sys/fs/cgroup")


class CpuDevice:
    """The host's CPU. CPU ranks use MPI for their collectives."""

    kind = "cpu"
    torch_type = "cpu"
    vendor_backend = None
    vendor_lacks: frozenset[str] = frozenset()
    library = plugin = ""
    run_on_hardware = "x86-64, by every run of the tests"
    is_host = True
    pace, calls = Pace(), CallPace()
    pins_memory = False
    futures_handle_streams = False

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return False: there is no such library."""
        return False

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Never called: there is no such library."""
        raise AssertionError("CPU ranks have no vendor's library")

    def leave_losses_to_caller(self) -> list[str]:
        """Return an empty list: there is no such library."""
        return []

    def abort_vendor_group(self, group: Any) -> None:
        """Never called: there is no such library."""

    def count(self) -> int:
        """Return the number of usable cores; any number of ranks may share them."""
        return len(usable_cores())

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

    def physical_id(self, index: int) -> str:
        """Return "": any number of ranks may share the CPU."""
        return ""

    def library_id(self, index: int) -> str:
        """Return "": there is no vendor's library."""
        return ""

    def memory_bytes(self, index: int) -> int:
        """Return the host's memory in bytes; its ranks share it."""
        return int(psutil.virtual_memory().total)

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        """Return the memory this process already uses, plus its part of the free memory."""
        return int(psutil.Process().memory_info().rss) + available_bytes(CGROUP) // sharers

    def restart_memory_peak(self, index: int) -> None:
        """Do nothing: memory is never returned to the system, so the peak only grows."""

    def memory_peak_bytes(self, index: int) -> int:
        """Return the process's memory, which includes freed memory (`keep_freed_memory`)."""
        return int(psutil.Process().memory_info().rss)

    def release_cached_memory(self) -> None:
        """Do nothing: freed memory is kept for the next step."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether the host had too little memory."""
        return isinstance(error, torch.OutOfMemoryError) or is_host_out_of_memory(error)

    def streams(self) -> None:
        """Return None: CPU calls return when done."""

    def keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing: there are no streams."""

    def mark(self) -> HostMark:
        """Return the time."""
        return HostMark()

    def random_state(self, index: int) -> None:
        """Return None: `torch.get_rng_state` has it."""

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        """Do nothing: `torch.set_rng_state` does."""


class HostMark:
    """The time of a call, when all earlier calls were done."""

    def __init__(self) -> None:
        self._sec = time.perf_counter()

    def is_reached(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def seconds_since(self, earlier: HostMark) -> float:
        """Return the seconds in between."""
        return self._sec - earlier._sec


def is_host_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, torch's CPU allocator or oneDNN had too little memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(map(str(error).__contains__, _OUT_OF_MEMORY))


def available_bytes(cgroup: Path) -> int:
    """Return the memory that is still available on the host or in the container.

    Args:
        cgroup: the folder of the control group (version 2) whose limit applies, if any.
    """
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
    """Make malloc keep freed memory instead of returning it to the system.

    Each training step frees and allocates the same large blocks; if they were returned to the
    kernel, every 4 KiB would cost a page fault. `benchmarks/memory_kept.py` measures it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(M_TRIM_THRESHOLD, _NEVER)
