"""What Linux has and other systems lack."""

from __future__ import annotations

import ctypes
import os
import tempfile


def usable_cores() -> frozenset[int]:
    """Return the cores this process may run on (its CPU affinity); all, where there is none."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def prctl(option: int, value: int) -> None:
    """Call Linux's `prctl`; elsewhere do nothing."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(option, value, 0, 0, 0)


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file without a path: in memory on Linux, else on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
