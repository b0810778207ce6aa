"""What receives the metrics of a run: a sink, and several of them that never fail."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from kaitian_mpi.observe.reading import Evaluated, Event, Logged, Reading

_log = logging.getLogger(__name__)

MAX_WAITING = 1000
_FINISH_SEC = 30.0
_FAILED_SEC = 3.0  # other ranks wait for this one to end


class MetricsSink:
    """Receives what is measured while a run trains, on the rank that writes the files.

    The methods do nothing here: a sink overrides those that it needs.
    """

    def on_reading(self, reading: Reading) -> None:
        """Receive a reading; one comes every `--log-interval` seconds."""

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Receive the results of an evaluation."""

    def on_logged(self, logged: Logged) -> None:
        """Receive what the script logged after the last reading; earlier ones hold their own."""

    def on_event(self, event: Event) -> None:
        """Receive an event."""

    def close(self, finished: bool) -> None:
        """Release all resources; called once, also if the run fails.

        Args:
            finished: whether the run finished.
        """


class KeepsJson(Protocol):
    """What a sink that continues a run needs from a run folder."""

    path: Path

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file's content; empty if it is missing or invalid."""

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file atomically."""


class Sinks:
    """Several sinks; one that raises is no longer used, and never ends the training.

    Empty on a rank that does not write the files. No method is collective.
    """

    def __init__(self, sinks: Iterable[MetricsSink] = ()) -> None:
        self._sinks = list(sinks)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def on_reading(self, reading: Reading) -> None:
        """Give a reading to all sinks."""
        self._each(lambda sink: sink.on_reading(reading))

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Give the results of an evaluation to all sinks."""
        self._each(lambda sink: sink.on_evaluation(evaluated))

    def on_logged(self, logged: Logged) -> None:
        """Give the script's own figures to all sinks."""
        self._each(lambda sink: sink.on_logged(logged))

    def on_event(self, event: Event) -> None:
        """Give an event to all sinks."""
        self._each(lambda sink: sink.on_event(event))

    def event(
        self,
        kind: str,
        step: int,
        text: str,
        ranks: Sequence[int] = (),
        at: float | None = None,
        **details: Any,
    ) -> None:
        """Give all sinks an event.

        Args:
            kind: one of `reading.KINDS`.
            step: the number of steps done.
            text: a sentence for people.
            ranks: the world ranks that it concerns.
            at: when it happened, in seconds since 1970; None: now.
            details: JSON values by name.
        """
        if self._sinks:
            when = time.time() if at is None else at
            self.on_event(
                Event(
                    step=step, time=when, kind=kind, text=text, ranks=list(ranks), details=details
                )
            )

    def close(self, finished: bool) -> None:
        """Close all sinks; later calls of any method do nothing."""
        self._each(lambda sink: sink.close(finished))
        self._sinks = []

    def _each(self, call: Callable[[MetricsSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                _log.warning(
                    "%s failed and receives no more metrics; training continues: %s: %s",
                    *(type(sink).__name__, type(error).__name__, error),
                )
                _log.debug("its traceback:", exc_info=True)


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
