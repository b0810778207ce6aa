"""A sink in a thread of its own, so that a slow one does not slow down the training."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kaitian_mpi.observe.reading import Evaluated, Event, Logged, Reading
from kaitian_mpi.observe.sink import MetricsSink

_log = logging.getLogger(__name__)

MAX_WAITING = 1000
_FINISH_SEC = 30.0
_FAILED_SEC = 3.0  # other ranks wait for this one to end


class BackgroundSink(MetricsSink):
    """Passes everything on to another sink, which a thread creates and calls, in order.

    While that sink is busy, up to `MAX_WAITING` calls wait; beyond that, the oldest are dropped.
    The thread is a daemon: it ends with the process.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], MetricsSink],
        *,
        finish_sec: float = _FINISH_SEC,
        failed_sec: float = _FAILED_SEC,
    ) -> None:
        """Start the thread.

        Args:
            name: for warnings.
            make: creates the other sink, in the thread; may be slow.
            finish_sec: how long `close` waits for the remaining calls if the run finished.
            failed_sec: how long it waits otherwise.
        """
        self._name, self._make = name, make
        self._patience_sec = {True: finish_sec, False: failed_sec}
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[MetricsSink], None]] = deque()
        self._lost = 0
        self._finished: bool | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def on_reading(self, reading: Reading) -> None:
        """Pass on a reading."""
        self._put(lambda sink: sink.on_reading(reading))

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Pass on the results of an evaluation."""
        self._put(lambda sink: sink.on_evaluation(evaluated))

    def on_logged(self, logged: Logged) -> None:
        """Pass on the script's own figures."""
        self._put(lambda sink: sink.on_logged(logged))

    def on_event(self, event: Event) -> None:
        """Pass on an event."""
        self._put(lambda sink: sink.on_event(event))

    def close(self, finished: bool) -> None:
        """Wait for the remaining calls, for a limited time."""
        deadline = time.monotonic() + self._patience_sec[finished]
        with self._changed:
            self._finished = finished
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _log.warning(
                "%s did not accept the last metrics within %.0f s; they may be missing there",
                *(self._name, self._patience_sec[finished]),
            )

    def _put(self, call: Callable[[MetricsSink], None]) -> None:
        with self._changed:
            if self._is_over:
                return
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
                if self._lost == 1:
                    _log.warning(
                        "%s cannot keep up: the oldest metrics that wait for it are dropped",
                        self._name,
                    )
            self._waiting.append(call)
            self._changed.notify()

    def _next(self) -> Callable[[MetricsSink], None] | None:
        """Return the next call, once there is one; None when the sink should be closed."""
        with self._changed:
            while not self._waiting and self._finished is None:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _work(self) -> None:
        try:
            sink = self._make()
            while (call := self._next()) is not None:
                call(sink)
            sink.close(bool(self._finished))
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            _log.warning(
                "%s failed and receives no more metrics; training continues: %s: %s",
                *(self._name, type(error).__name__, lines[0]),
            )
            _log.debug("its traceback:", exc_info=True)
        with self._changed:
            self._is_over = True
            self._waiting.clear()
