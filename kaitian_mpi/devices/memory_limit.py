"""Emulated memory: a CPU rank whose allocations beyond a limit fail, as on a small device."""

from __future__ import annotations

import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kaitian_mpi.devices.emulation import MEMORY_FLAG
from kaitian_mpi.devices.plugin import import_for_optimizers
from kaitian_mpi.errors import UserError

_USUAL_STACK = 8 << 20
_USUAL_THREADS = 8
_LINES = re.MULTILINE | re.DOTALL
_UNITS = {"MB": 10**6, "GB": 10**9}
_STATUS, _MAPS = Path("/proc/self/status"), Path("/proc/self/maps")
_CLEAR = Path("/proc/self/clear_refs")
_STACK_BYTES = 1 << 20


class LimitedDevice:
    """A CPU with a limit on the bytes that this process may allocate beyond those at its start.

    The operating system enforces it (RLIMIT_DATA), for torch, Python and MPI alike: torch raises
    its own error, and Python a MemoryError. All allocated memory counts, including freed memory
    that malloc keeps; mapped files and the stacks of threads do not. As on a device, large blocks
    are returned when they are freed, so that kept memory has no unusable gaps.
    """

    _limit = 0  # bytes that this process may allocate
    _at_start = 0  # bytes that this process had allocated before its first limit
    _resident_at_start = 0  # those of them that were resident

    def __init__(self, device: Any, limit: int, present: int = 0) -> None:
        """Limit this process from now on.

        `present` bytes that it has already count; if there are any, it is limited from the end of
        the next `unlimited` block on, in which it can free them.
        """
        self.device = device
        self.limit = limit
        if not LimitedDevice._at_start:
            import_for_optimizers()  # code does not count as device memory
            LimitedDevice._at_start = _allocated() - present
            LimitedDevice._resident_at_start = _resident()
            threading.stack_size(_STACK_BYTES)  # otherwise each new thread would count 8 MB
            device.return_large_blocks()
        LimitedDevice._limit = LimitedDevice._at_start + limit
        if not present:
            _set_limit()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def memory_bytes(self, index: int) -> int:
        return self.limit

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        return self.limit

    def restart_memory_peak(self, index: int) -> None:
        with suppress(OSError):  # some kernels do not permit it
            _CLEAR.write_text("5")
        _set_limit()  # there may be more threads

    def memory_peak_bytes(self, index: int) -> int:
        peak = _resident() - LimitedDevice._resident_at_start
        return max(peak, _allocated() - LimitedDevice._at_start)


def parse_memory(text: str, world_size: int) -> list[int]:
    """Parse `1:600MB,2:1.5GB`: the bytes of each world rank, 0 for one without a limit.

    Raises:
        UserError: it is malformed.
    """
    limits = [0] * world_size
    for entry in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)(MB|GB)", entry)
        if match is None or int(match[1]) >= world_size or not float(match[2]):
            raise UserError(
                f"{MEMORY_FLAG}: {entry!r} is not a limit; write rank:size with a rank from 0 to "
                f"{world_size - 1} and a size in MB or GB, such as 1:600MB"
            )
        limits[int(match[1])] = round(float(match[2]) * _UNITS[match[3]])
    return limits


def limit_memory(
    device: Any, text: str, rank: int, ranks: int, present: int = 0
) -> tuple[Any, list[int]]:
    """Return a rank's device with its limit, and the limits of all `ranks` ranks.

    `present` bytes count that the process has already: see `LimitedDevice`.

    Raises:
        UserError: the text is malformed, or this rank cannot be limited.
    """
    limits = parse_memory(text, ranks)
    if limits[rank]:
        if not device.is_host or not _STATUS.exists():
            raise UserError(
                f"{MEMORY_FLAG}: only CPU ranks on Linux can be limited; give the others no limit"
            )
        device = LimitedDevice(device, limits[rank], present)
    return device, limits


def is_limited() -> bool:
    """Return whether this process has a limit."""
    return LimitedDevice._limit > 0


@contextmanager
def unlimited() -> Iterator[None]:
    """Lift the limit in the block, to map files: they do not count as device memory."""
    if not LimitedDevice._limit:
        yield
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        _set_limit()


def _set_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # counting needs memory itself
    # Includes threads that start later, such as those that communicate and save.
    limit = LimitedDevice._limit + _mapped() + _stacks(max(_sizes()[1] + 1, _USUAL_THREADS))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _allocated() -> int:
    """Return this process's allocated bytes, without files and the stacks of threads."""
    data, threads = _sizes()
    return data - _mapped() - _stacks(threads)


def _sizes() -> tuple[int, int]:
    """Return the bytes of this process's private writable memory, and its number of threads."""
    match = re.search(r"^VmData:\s+(\d+) kB.*^Threads:\s+(\d+)", _STATUS.read_text(), _LINES)
    assert match is not None
    return int(match[1]) << 10, int(match[2])


def _stacks(threads: int) -> int:
    """Return the bytes of the stacks of all threads but the main one."""
    size = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return (threads - 1) * (_USUAL_STACK if size == resource.RLIM_INFINITY else size)


def _resident() -> int:
    """Return the peak of resident bytes, without files."""
    status = _STATUS.read_text()
    peak, *files = (
        int(match[1]) << 10
        for name in ("VmHWM", "RssFile", "RssShmem")
        if (match := re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE))
    )
    return peak - sum(files)


def _mapped() -> int:
    """Return the bytes of it that are mapped files."""
    ranges = re.findall(r"^(\w+)-(\w+) .w.p \S+ \S+ [1-9]", _MAPS.read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)
