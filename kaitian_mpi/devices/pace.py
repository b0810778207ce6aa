"""The pace at which a rank computes: real, or slowed down by sleeping.

Without a factor above 1, nothing here does anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.runtime.threads import CommunicationThread

Result = TypeVar("Result")

Schedule = tuple[tuple[int, float], ...]
"""A rank's slowdown factors: pairs (s, f) for f times slower from step s on, sorted by step."""

_MIN_SLEEP_SEC = 1e-3  # shorter ones would take much longer than asked for


class Pace:
    """The pace of a rank's steps: slows them by sleeping in proportion to their compute time.

    Sleeping uses no core, so that a slow device can be emulated beside a fast one. The compute time
    is the calling thread's own CPU time: waiting for a core that another rank uses is not a
    property of the device, and is not multiplied. A factor of 1 never sleeps.
    """

    def __init__(self, schedule: Schedule = ()) -> None:
        self._schedule = schedule
        self._mark_sec = time.thread_time()
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Use the factor of this step, counted from 1; 0 is before training."""
        self.factor = next((f for since, f in reversed(self._schedule) if since <= step), 1.0)

    def start(self) -> None:
        """Start measuring compute time."""
        self._mark_sec = time.thread_time()

    def catch_up(self) -> None:
        """Sleep `factor - 1` times the CPU time since the last call of this or `start`.

        To be called by the thread that computes, which on the CPU is the one that calls backward.
        """
        if self.factor > 1.0:
            time.sleep((self.factor - 1.0) * (time.thread_time() - self._mark_sec))
        self._mark_sec = time.thread_time()


class _Computing(threading.local):
    """What one thread has computed."""

    since_sec: float | None = None
    """The thread's CPU time when it last communicated; None if that is not known."""
    owed_sec: float = 0.0
    """How long the thread still has to sleep; negative after a sleep that took longer."""


class CallPace:
    """The pace of a script whose loop is its own: slows it by sleeping before it communicates.

    Before each call, the calling thread sleeps `factor - 1` times the CPU time that it has used
    since its last one. So neither the time in a call counts, nor that of waiting for its result or
    for a core. The first call of a thread starts the measurement. Sleeps of under a millisecond are
    saved up.

    A `Training` has the pace of its steps, so this one pauses meanwhile.
    """

    def __init__(self, schedule: Schedule = (), needs_training: str = "") -> None:
        """Start without having measured anything.

        Args:
            schedule: this rank's factors; only the one that applies from the start is used.
            needs_training: the error for a script that communicates before any `Training`; empty if
                it may.
        """
        self._factor = Pace(schedule).factor
        self._error = needs_training
        self._is_paused = False
        self._computing = _Computing()

    def around(self, call: Callable[..., Result]) -> Callable[..., Result]:
        """Return a function that sleeps, then calls `call`; `call` itself if nothing is slowed."""
        if self._factor == 1.0 and not self._error:
            return call

        def slowed(*arguments: Any) -> Result:
            self._catch_up()
            try:
                return call(*arguments)
            finally:
                self._computing.since_sec = None if self._is_paused else time.thread_time()

        return slowed

    def forget(self) -> None:
        """Forget what this thread has used so far; its next call starts the measurement again."""
        self._computing.since_sec = None

    def pause(self) -> None:
        """Stop slowing down: a `Training` slows its own steps."""
        self._is_paused, self._error = True, ""

    def resume(self) -> None:
        """Slow down again, from each thread's next call on."""
        self._is_paused, self._computing = False, _Computing()

    def _catch_up(self) -> None:
        computing = self._computing
        # Between its calls, a thread of our own mostly executes other collectives.
        if self._is_paused or isinstance(threading.current_thread(), CommunicationThread):
            return
        if self._error:
            raise AgreedError(self._error)
        if computing.since_sec is None:
            return
        used_sec = time.thread_time() - computing.since_sec
        computing.owed_sec += (self._factor - 1.0) * used_sec
        if computing.owed_sec >= _MIN_SLEEP_SEC:
            began = time.perf_counter()
            time.sleep(computing.owed_sec)
            slept = time.perf_counter() - began
            # A longer delay was a wait for a core, which is no property of the device.
            computing.owed_sec = max(computing.owed_sec - slept, -_MIN_SLEEP_SEC)
