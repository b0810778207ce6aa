"""Emulates slow ranks in scripts whose loop this package does not know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kaitian_mpi.devices.emulation import Schedule, Slowdown
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.runtime.threads import CommunicationThread

Result = TypeVar("Result")

_MIN_SLEEP_SEC = 1e-3  # shorter ones would take much longer than asked for


class _Computing(threading.local):
    """What one thread has computed."""

    since_sec: float | None = None
    """The thread's CPU time when it last communicated; None if that is not known."""
    owed_sec: float = 0.0
    """How long the thread still has to sleep; negative after a sleep that took longer."""


class ScriptSlowdown:
    """Slows a process down by sleeping before its communication, for all its process groups.

    Before each call, the calling thread sleeps `factor - 1` times the CPU time that it has used
    since its last one. So neither the time in a call counts, nor that of waiting for its result or
    for a core. The first call of a thread starts the measurement. Sleeps of under a millisecond are
    saved up.

    A `Training` emulates its ranks' slowdowns itself, step by step, so this one pauses meanwhile.
    """

    def __init__(self, schedule: Schedule = (), needs_training: str = "") -> None:
        """Start without having measured anything.

        Args:
            schedule: this rank's factors; only the one that applies from the start is used.
            needs_training: the error for a script that communicates before any `Training`; empty if
                it may.
        """
        self._factor = Slowdown(schedule).factor
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
        """Stop slowing down: a `Training` does so itself."""
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
