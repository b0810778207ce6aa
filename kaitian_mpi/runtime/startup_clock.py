"""Where the seconds go between mpirun's start and the first step."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kaitian_mpi.runtime.mpi_libraries import LIBRARIES


class StartupClock:
    """Divides the time until the first step into phases, one after the other.

    The first two are known from the kernel: `launch`, from the start of mpirun, or of its daemon on
    this host, to that of this process; and `python`, from there to the first `begin`.
    """

    def __init__(self) -> None:
        """Start in the phase `python`."""
        own, self._launch_sec = _started_sec_ago(), _launch_sec()
        self._since = time.monotonic() - own
        self.started_at = time.time() - own - (self._launch_sec or 0.0)
        """When mpirun, or this process without it, was started, in seconds since 1970."""
        self._phase = "python"
        self._seconds: dict[str, float] = {}
        self._is_done = False

    def begin(self, phase: str) -> None:
        """End the current phase, and begin another one; a name may come again."""
        if not self._is_done:
            now = time.monotonic()
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
            self._phase, self._since = phase, now

    def finish(self) -> dict[str, float] | None:
        """End the last phase; return the seconds of all, in order. None if called before."""
        if self._is_done:
            return None
        self.begin("")
        self._is_done = True
        launch = {} if self._launch_sec is None else {"launch": self._launch_sec}
        return {name: round(seconds, 3) for name, seconds in {**launch, **self._seconds}.items()}


def describe(seconds: dict[str, float]) -> str:
    """Return the phases as a line."""
    parts = ", ".join(f"{name} {each:.1f}" for name, each in seconds.items())
    since = "mpirun" if "launch" in seconds else "the process started"
    return f"start-up: first step done {sum(seconds.values()):.1f} s after {since} ({parts})"


def _launch_sec() -> float | None:
    """Return how long after its launcher this process started; None if a script has started it."""
    try:
        launcher = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
        if not any(launcher in library.processes for library in LIBRARIES):
            return None
        return (_start_ticks(os.getpid()) - _start_ticks(os.getppid())) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


def _started_sec_ago() -> float:
    """Return the age of this process."""
    if not hasattr(time, "CLOCK_BOOTTIME"):  # nor is there /proc
        return 0.0
    try:
        started = _start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def _start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


_clock = StartupClock()


def begin(phase: str) -> None:
    """End this process's current phase of starting up, and begin another one."""
    _clock.begin(phase)


def started_at() -> float:
    """Return when the job was started, in seconds since 1970."""
    return _clock.started_at


def finish() -> dict[str, float] | None:
    """End this process's start-up; see `StartupClock.finish`."""
    return _clock.finish()
