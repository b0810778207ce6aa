"""How much of the host's cores the page may use: little if the ranks keep all of them busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from kaitian_mpi.runtime.system import usable_cores

MIN_SHARE, MAX_SHARE = 0.01, 0.2
_SHARE_OF_IDLE = 0.1


class SpareCores:
    """Watches how many of the cores that this process may use are idle."""

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        """Start measuring.

        Args:
            read: returns the seconds that these cores have been idle, summed over the cores; by
                default from the kernel's counters.
        """
        self._read = read or _idle_sec
        self._clock = time.monotonic
        self._since, self._idle_sec = self._clock(), self._read()
        self._idle = 0.0

    def share(self) -> float:
        """Return the share of one core to use, from `MIN_SHARE` to `MAX_SHARE`."""
        now, idle_sec = self._clock(), self._read()
        if now - self._since >= 1.0:  # the kernel counts in hundredths of a second
            self._idle = (idle_sec - self._idle_sec) / (now - self._since)
            self._since, self._idle_sec = now, idle_sec
        return min(MAX_SHARE, max(MIN_SHARE, self._idle * _SHARE_OF_IDLE))


class Budget:
    """Spreads work over time so that it takes no more than a share of one core."""

    def __init__(
        self, share: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Allow the first work at once.

        Args:
            share: returns the share of one core, as a fraction.
            clock: returns seconds.
        """
        self._share, self._clock = share, clock
        self._free_at = 0.0

    def is_free(self) -> bool:
        """Return whether work may begin."""
        return self._clock() >= self._free_at

    def spend(self, cpu_sec: float) -> None:
        """Delay the next work, because this many seconds of a core were used."""
        now = self._clock()
        self._free_at = max(self._free_at, now) + max(0.0, cpu_sec) / self._share()

    def rest(self, seconds: float) -> None:
        """Delay the next work by at least this long."""
        self._free_at = max(self._free_at, self._clock() + seconds)


def use_cores_of_launcher(rank: int) -> None:
    """Let this process run on every core that the rank's launcher may use.

    mpirun binds a rank to some cores, and what the rank starts inherits them: the page would take
    its rank's core though others are idle.

    Args:
        rank: the pid of the rank, which is the launcher's child.
    """
    if hasattr(os, "sched_setaffinity"):
        with suppress(psutil.Error, OSError):  # the rank may have just ended
            os.sched_setaffinity(0, os.sched_getaffinity(psutil.Process(rank).ppid()))


def _idle_sec() -> float:
    """Return the seconds that the cores this process may use were idle since boot, summed."""
    times = psutil.cpu_times(percpu=True)
    return sum(times[core].idle for core in usable_cores() if core < len(times))
