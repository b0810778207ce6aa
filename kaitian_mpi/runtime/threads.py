"""Threads: how many torch computes with, and how threads take turns on a core."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call; the C library may not have it
_RESET_ON_FORK = 1
_LONG_TURN_NS = 100_000_000

_default: int | None = None


class _SchedAttr(ctypes.Structure):
    """Linux's `struct sched_attr`, see sched_setattr(2)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


class CommunicationThread(threading.Thread):
    """A thread that executes collectives or messages; of the script, it runs only callbacks."""


def take_long_turns() -> None:
    """Let this thread compute for up to 100 ms at a time while others want its core.

    For more ranks than cores: each turn begins with caches that hold another rank's data. Threads
    that this one starts do not inherit it: those that communicate still interrupt who computes.
    Without effect before Linux 6.12. `benchmarks/oversubscribed.py` shows it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    attributes = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        policy=os.SCHED_OTHER,
        flags=_RESET_ON_FORK,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime=_LONG_TURN_NS,
    )
    # A container may refuse it; then turns are as short as usual.
    ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), 0)


def record_default_threads() -> None:
    """Record torch's current number of threads as the default, not chosen by the script."""
    import torch

    global _default
    _default = torch.get_num_threads()


def set_default_threads(threads: int) -> int:
    """Set torch's number of threads, unless the script has changed it from the default.

    Returns:
        The number of threads torch computes with.
    """
    import torch

    if _default is None or torch.get_num_threads() == _default:
        torch.set_num_threads(threads)
        record_default_threads()
    return torch.get_num_threads()
