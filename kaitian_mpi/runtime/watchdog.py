"""A watchdog for each rank: MPI does not notice one that is stopped, or computes for ever.

A small process of its own, `watchdog_process.py`, hears of the rank's phases and heartbeats through
a pipe, and turns a hang into the rank's death, which MPI and the launcher do notice.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.runtime.abort import label
from kaitian_mpi.runtime.launcher import read_launch

_log = logging.getLogger(__name__)

_LONGEST_BEAT_SEC = 1.0
_BEATS_PER_LIMIT = 8
# Room for 2,000 phases a second until the next reading, which comes after 1 s at the latest.
_PIPE_BYTES = 1 << 18
_LONGEST_PHASE = 200  # characters: a short line is written whole or not at all
_CLOSING_SEC = 0.5

_STEPS = 50
_STEPS_PER_LIMIT = 20
_LEAST_LIMIT_SEC = 60.0
_LEAST_CHANGE = 0.2
_FIRST_LIMIT_SEC = 600.0
_SETUP_LIMIT_SEC = 1800.0


class Watchdog:
    """Ends this process by SIGKILL when it hangs, and says on stderr in which phase.

    It is ended when it gives no sign of life for `limit_sec` (stopped, or a call holds the
    interpreter's lock), when one phase of computing lasts longer than that, when it waits for other
    ranks for twice as long and 5 s more, and when its launcher is gone. No call is collective, none
    waits but `close`.

    Args:
        name: how messages begin, such as `[2@host]`.
        limit_sec: seconds that a phase may last.
        follow_launcher: whether to end this process when its parent has ended. Not for a job that
            was started from a shell, which may be left behind.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self, name: str, limit_sec: float, *, follow_launcher: bool = True) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        with suppress(OSError):  # a user may hold only so much: 64 KB do as well
            fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._serial = itertools.count()
        self._woken = threading.Event()
        self._closed = False
        self._set_limit(limit_sec)
        self.enter("start-up", limited=False)
        try:
            self._process = _start_process(name, reader, os.getppid() if follow_launcher else 0)
        except OSError:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)
        self._beats = threading.Thread(target=self._beat, name="kaitian-watchdog", daemon=True)
        self._beats.start()

    def enter(
        self, phase: str, *, step: int | None = None, waits: bool = False, limited: bool = True
    ) -> None:
        """Begin a phase; the one before ends. Costs microseconds, never waits, never raises.

        For one thread of the rank.

        Args:
            phase: what the rank does now, in words that follow "61 s in".
            step: the step it belongs to.
            waits: whether the rank waits for others, and so is not itself to blame.
            limited: whether the phase may last no longer than the limit; if not (start-up, reading
                a data set), only signs of life are asked for.
        """
        now = time.monotonic()
        number = "" if step is None else step
        self._phase = f"{now:.3f} {waits:d} {limited:d} {number} {phase[:_LONGEST_PHASE]}"
        self._report(now)

    def set_limit(self, limit_sec: float) -> None:
        """Change the limit, for the present phase as well. From the thread that calls `enter`."""
        self._set_limit(limit_sec)
        self._report(time.monotonic())
        self._woken.set()  # the next beat may have to come sooner

    def close(self) -> None:
        """End the watch; waits for the process and the thread, for a second at most."""
        if self._closed:
            return
        self._closed = True
        self._woken.set()
        self._beats.join(_CLOSING_SEC)
        # First forgotten, then closed: the next file opened gets the same number.
        writer, self._writer = self._writer, -1
        os.close(writer)
        try:
            self._process.wait(_CLOSING_SEC)
        except subprocess.TimeoutExpired:  # it is stopped, or a forked worker holds the pipe
            self._process.kill()
            self._process.wait()

    def _set_limit(self, limit_sec: float) -> None:
        assert limit_sec > 0
        self._limit = limit_sec
        self._interval_sec = min(_LONGEST_BEAT_SEC, limit_sec / _BEATS_PER_LIMIT)

    def _report(self, now: float) -> None:
        self._state = f"{next(self._serial)} {self._limit} {self._phase}"
        self._write(now, self._state)

    def _beat(self) -> None:
        while not self._closed:
            # The phase goes with each beat, for it may have found the pipe full.
            self._write(time.monotonic(), self._state)
            self._woken.wait(self._interval_sec)
            self._woken.clear()

    def _write(self, now: float, state: str) -> None:
        # Nothing to do if the pipe is full or its reader gone: the training goes on.
        try:
            os.write(self._writer, f"{now:.3f} {state}\n".encode(errors="replace"))
        except OSError:
            return


def _start_process(name: str, reader: int, launcher: int) -> subprocess.Popen[bytes]:
    script = Path(__file__).absolute().with_name("watchdog_process.py")
    numbers = (str(os.getpid()), str(launcher))
    return subprocess.Popen(  # noqa: S603  # our own file, no shell
        [sys.executable, "-I", "-S", str(script), "kaitian-watchdog", name, *numbers],
        stdin=reader,
        stdout=subprocess.DEVNULL,
    )


def first_limit(given_sec: float) -> float:
    """Return the limit for a step as long as no step's time is known; the first may compile."""
    return given_sec or _FIRST_LIMIT_SEC


def setup_limit(given_sec: float) -> float:
    """Return the limit for a phase before training: loading data, building the model, a benchmark.

    Args:
        given_sec: the limit for a step; 0 where none is given.

    Returns:
        Seconds: 20 times as many, or half an hour.
    """
    return _STEPS_PER_LIMIT * given_sec or _SETUP_LIMIT_SEC


class StepLimit:
    """The limit of time for the phases of a step: as given, or from the steps so far.

    Args:
        given_sec: seconds; 0 for 20 times the median of the last 50 steps, at least 60 s.
        first_sec: the limit as long as no step is known.

    Attributes:
        limit_sec: the limit as it is now, in seconds.
    """

    def __init__(self, given_sec: float, first_sec: float = _LEAST_LIMIT_SEC) -> None:
        assert given_sec >= 0
        self._given = given_sec > 0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self.limit_sec = given_sec if self._given else first_sec

    def observe(self, step_sec: float) -> float | None:
        """Count a step in; return the new limit in seconds if it changes by more than 20%."""
        if self._given:
            return None
        self._steps.append(step_sec)
        limit = max(_LEAST_LIMIT_SEC, _STEPS_PER_LIMIT * statistics.median(self._steps))
        if abs(limit - self.limit_sec) <= _LEAST_CHANGE * self.limit_sec:
            return None
        self.limit_sec = limit
        return limit


_current: Watchdog | None = None


def start_watching(limit_sec: float) -> Watchdog | None:
    """Watch this rank from now on; return None where no process can be started for it.

    Args:
        limit_sec: seconds that a phase may last.
    """
    global _current
    alone = read_launch(os.environ).world_size == 1  # may be left behind by the shell it came from
    with suppress(OSError):
        _current = Watchdog(label(), limit_sec, follow_launcher=not alone)
    return _current


def enter_phase(
    phase: str, *, step: int | None = None, waits: bool = False, limited: bool = True
) -> None:
    """Tell this rank's watchdog what the rank does now, as `Watchdog.enter`, if it is watched."""
    _log.debug("%s", phase if step is None else f"step {step}: {phase}")
    if _current is not None:
        _current.enter(phase, step=step, waits=waits, limited=limited)


def set_phase_limit(limit_sec: float) -> None:
    """Change how long a phase may last, if this rank is watched."""
    if _current is not None:
        _current.set_limit(limit_sec)
