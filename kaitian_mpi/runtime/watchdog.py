"""A watchdog for each rank: a process that kills it when it is stopped or computes forever."""

from __future__ import annotations

import logging
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kaitian_mpi.runtime.abort import rank_prefix
from kaitian_mpi.runtime.launcher import read_launch

_log = logging.getLogger(__name__)

_MAX_HEARTBEAT_SEC = 1.0
_HEARTBEATS_PER_LIMIT = 8
_MAX_PHASE_LENGTH = 200  # characters: a short line is written whole or not at all
_CLOSE_SEC = 0.5

_MEDIAN_STEPS = 50
_STEPS_PER_LIMIT = 20
_MIN_LIMIT_SEC = 60.0
_MIN_CHANGE = 0.2
_FIRST_LIMIT_SEC = 600.0
_SETUP_LIMIT_SEC = 1800.0


class Phase(NamedTuple):
    """A rank's activity: the arguments of `Watchdog.enter`."""

    name: str
    step: int | None
    since: float
    """Its begin, by `time.monotonic`."""
    waits: bool
    allowed_sec: float | None
    """The longest time it may last; None: the watchdog's limit; infinite: no limit."""

    def __str__(self) -> str:
        return self.name if self.step is None else f"{self.name} of step {self.step}"


class Watchdog:
    """Kills this process with SIGKILL when it hangs, and reports the phase on stderr.

    It hangs when it sends no heartbeat for `limit_sec`, when a phase lasts longer than that, when
    it waits for other ranks for twice as long plus 5 s, and when the launcher that it follows has
    exited. A stopped process (SIGSTOP) hangs after `stopped_sec` without a heartbeat if that is
    shorter, whatever phases may last. Only `close` blocks.
    """

    def __init__(
        self,
        name: str,
        limit_sec: float,
        stopped_sec: float = math.inf,
        *,
        follow_launcher: bool = True,
    ) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._lock = threading.Lock()  # so that the last line in the pipe is the newest
        self._woken = threading.Event()
        self.limit_sec = limit_sec
        self._stopped_sec = stopped_sec
        self.enter("start-up", limited=False)
        try:
            script = Path(__file__).absolute().with_name("watchdog_process.py")
            pids = str(os.getpid()), str(os.getppid() if follow_launcher else 0)
            words = "kaitian-watchdog", name, *pids, str(stopped_sec)
            self._process = subprocess.Popen(  # noqa: S603  # our own file, no shell
                [sys.executable, "-I", "-S", str(script), *words],
                stdin=reader,
                stdout=subprocess.DEVNULL,
            )
        except OSError:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, name="kaitian-watchdog", daemon=True
        )
        self._heartbeats.start()

    @property
    def interval_sec(self) -> float:
        """The time between two heartbeats."""
        limit = min(self.limit_sec, self._stopped_sec)
        return min(_MAX_HEARTBEAT_SEC, limit / _HEARTBEATS_PER_LIMIT)

    def enter(
        self, phase: str, *, step: int | None = None, waits: bool = False, limited: bool = True
    ) -> None:
        """Start a phase, worded to follow "61 s in". From one thread; never blocks, never raises.

        A rank that `waits` for others is not itself at fault; one that is not `limited` (start-up,
        reading a dataset) only has to send heartbeats.
        """
        now = time.monotonic()
        allowed = None if limited else math.inf
        with self._lock:
            self.phase = Phase(phase[:_MAX_PHASE_LENGTH], step, now, waits, allowed)
            self._report(now)

    def renew(self, phase: Phase, allowed_sec: float | None) -> None:
        """Restart the time of a phase, unless it has ended; from any thread."""
        now = time.monotonic()
        with self._lock:
            if self.phase is phase:
                self.phase = phase._replace(since=now, allowed_sec=allowed_sec)
                self._report(now)

    def set_limit(self, limit_sec: float) -> None:
        """Change the limit, for the current phase too. From the thread that calls `enter`."""
        with self._lock:
            self.limit_sec = limit_sec
            self._report(time.monotonic())
        self._woken.set()  # the next heartbeat may be due sooner

    def close(self) -> None:
        """Stop watching; waits for the watchdog process and the thread for at most a second."""
        # Cleared before closing: the next file opened gets the same descriptor.
        writer = self._writer
        self._writer = -1
        if writer < 0:
            return
        self._woken.set()
        self._heartbeats.join(_CLOSE_SEC)
        os.close(writer)
        try:
            self._process.wait(_CLOSE_SEC)
        except subprocess.TimeoutExpired:
            # The process is stopped, or a forked worker holds the pipe.
            self._process.kill()
            self._process.wait()

    def _report(self, now: float) -> None:
        name, step, since, waits, allowed = self.phase
        allowed = self.limit_sec if allowed is None else allowed
        number = "" if step is None else step
        line = f"{now:.3f} {self.limit_sec} {since:.3f} {allowed} {waits:d} {number} {name}\n"
        with suppress(OSError):  # a full pipe or a dead reader: training continues
            os.write(self._writer, line.encode(errors="replace"))

    def _send_heartbeats(self) -> None:
        while self._writer >= 0:
            with self._lock:
                self._report(time.monotonic())  # repeats a report that found the pipe full
            self._woken.wait(self.interval_sec)
            self._woken.clear()


def first_step_limit(given_sec: float) -> float:
    """Return the limit in seconds for the first step, which may compile and has no predecessor."""
    return given_sec or _FIRST_LIMIT_SEC


def setup_limit(given_sec: float) -> float:
    """Return the limit in seconds for a phase before training, given that of a step (0: none)."""
    return _STEPS_PER_LIMIT * given_sec or _SETUP_LIMIT_SEC


class StepLimit:
    """The limit of a step's phases: given, or 20 times the median of the last 50, at least 60 s.

    The first `warm_up` steps, in which kernels may still be compiled, can only raise it.
    """

    def __init__(self, given_sec: float, warm_up: int = 1) -> None:
        assert given_sec >= 0
        self._is_given = given_sec > 0
        self._warm_up = warm_up
        self._steps: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self.limit_sec = first_step_limit(given_sec)

    def apply(self) -> None:
        """Apply the limit to the phases that follow."""
        set_phase_limit(self.limit_sec)

    def observe(self, step_sec: float) -> None:
        """Add a step's time, and apply the new limit if it changes by more than 20%."""
        self._steps.append(step_sec)
        limit = max(_MIN_LIMIT_SEC, _STEPS_PER_LIMIT * statistics.median(self._steps))
        is_early = limit < self.limit_sec and len(self._steps) < self._warm_up
        is_new = abs(limit - self.limit_sec) > _MIN_CHANGE * self.limit_sec
        if is_new and not (is_early or self._is_given):
            self.limit_sec = limit
            self.apply()


_current: Watchdog | None = None
_on_phase: Callable[[str, int | None], None] | None = None


def start_watchdog(limit_sec: float, stopped_sec: float = math.inf) -> Watchdog | None:
    """Start this rank's watchdog; return None if its process cannot be started."""
    global _current
    is_alone = read_launch(os.environ).world_size == 1  # may outlive the shell that started it
    with suppress(OSError):
        _current = Watchdog(rank_prefix(), limit_sec, stopped_sec, follow_launcher=not is_alone)
    return _current


def current_watchdog() -> Watchdog | None:
    """Return this rank's watchdog, if it has one."""
    return _current


def stop_watchdog() -> None:
    """End this rank's watchdog, if it has one."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def watch_end() -> None:
    """From now on end this rank only if it is stopped: what a script does after training may last.

    So may the end of MPI, in which ranks wait for each other, without a heartbeat. A job of one
    rank is watched no longer.
    """
    if _current is None:
        return
    if read_launch(os.environ).world_size == 1:
        stop_watchdog()
        return
    _current.enter("the script's own code", limited=False)
    _current.set_limit(math.inf)


def enter_phase(
    phase: str, *, step: int | None = None, waits: bool = False, limited: bool = True
) -> None:
    """Log this rank's phase, and report it to its watchdog if it has one; see `Watchdog.enter`."""
    _log.debug("%s", phase if step is None else f"step {step}: {phase}")
    if _on_phase is not None:
        _on_phase(phase, step)
    if _current is not None:
        _current.enter(phase, step=step, waits=waits, limited=limited)


def on_phase(listener: Callable[[str, int | None], None] | None) -> None:
    """Call `listener` with the name and step of each phase that this rank enters; None: stop."""
    global _on_phase
    _on_phase = listener


def set_phase_limit(limit_sec: float) -> None:
    """Change the time limit of phases, if this rank has a watchdog."""
    if _current is not None:
        _current.set_limit(limit_sec)
