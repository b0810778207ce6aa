"""The pace at which a rank computes: real, or slowed down by sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kaitian_mpi.runtime.system import CommunicationThread

Result = TypeVar("Result")

Schedule = tuple[tuple[int, float], ...]
"""A rank's slowdown factors: pairs (s, f) for f times slower from step s on, sorted by step."""


class Pace:
    """The pace of a rank's steps: sleeps in proportion to the thread's own CPU time."""

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
        """Sleep `factor - 1` times this thread's CPU time since the last call or `start`."""
        if self.factor > 1.0:
            time.sleep((self.factor - 1.0) * (time.thread_time() - self._mark_sec))
        self._mark_sec = time.thread_time()


class _Computing(threading.local):
    """The thread's CPU time when it last communicated; None if that is not known."""

    since_sec: float | None = None


class CallPace:
    """The pace of a script's own loop: each call sleeps for the CPU time since the last one."""

    def __init__(self, schedule: Schedule = ()) -> None:
        self._factor = Pace(schedule).factor
        self._is_paused = False
        self._computing = _Computing()

    def around(self, call: Callable[..., Result]) -> Callable[..., Result]:
        """Return a function that sleeps, then calls `call`; `call` itself if nothing is slowed."""
        if self._factor == 1.0:
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
        self._is_paused = True

    def resume(self) -> None:
        """Slow down again, from each thread's next call on."""
        self._is_paused = False
        self._computing = _Computing()

    def _catch_up(self) -> None:
        since_sec = self._computing.since_sec
        # Between its calls, a thread of our own mostly executes other collectives.
        is_own = isinstance(threading.current_thread(), CommunicationThread)
        if since_sec is not None and not self._is_paused and not is_own:
            time.sleep((self._factor - 1.0) * (time.thread_time() - since_sec))
