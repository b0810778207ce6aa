"""Where the seconds go between mpirun's start and the first step."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.runtime.mpi_libraries import LIBRARIES


class StartupClock:
    """Divides the time until the first step into phases, from the start of mpirun."""

    def __init__(self) -> None:
        self.started_at, self._since = time.time(), time.monotonic()
        """`started_at`: when mpirun, or this process without it, was started, since 1970."""
        self._phase, self._is_done = "python", False
        self._seconds: dict[str, float] = {}
        with suppress(OSError, AttributeError):
            own, parent = _started(os.getpid()), os.getppid()
            age = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - own)
            self._since, self.started_at = self._since - age, self.started_at - age
            name = Path(f"/proc/{parent}/comm").read_text().strip()
            if any(name in library.processes for library in LIBRARIES):
                self._seconds["launch"] = own - _started(parent)
                self.started_at -= self._seconds["launch"]

    def begin(self, phase: str) -> None:
        """End the current phase, and begin another one; a name may come again."""
        now = time.monotonic()
        if not self._is_done:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
            self._phase, self._since = phase, now

    def finish(self) -> dict[str, float] | None:
        """End the last phase; return the seconds of all, in order. None if called before."""
        if self._is_done:
            return None
        self.begin("")
        self._is_done = True
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}


def _started(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def describe(seconds: dict[str, float]) -> str:
    """Return the phases as a line."""
    parts = ", ".join(f"{name} {each:.1f}" for name, each in seconds.items())
    since = "mpirun" if "launch" in seconds else "the process started"
    return f"start-up: first step done {sum(seconds.values()):.1f} s after {since} ({parts})"


_clock = StartupClock()
begin, finish = _clock.begin, _clock.finish


def started_at() -> float:
    """Return when the job was started, in seconds since 1970."""
    return _clock.started_at
