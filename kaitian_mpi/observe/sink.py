"""Sinks, which receive the metrics of a run; a failing sink never ends the training."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.reading import Event, Figures, Reading

_log = logging.getLogger(__name__)

MAX_WAITING = 1000
_PATIENCE_SEC = {True: 30.0, False: 3.0}
"""The longest wait, by whether the run finished; if it did not, other ranks wait for this one."""


class MetricsSink:
    """Receives the measurements of a run, on the rank that writes the files.

    The methods do nothing here: a sink overrides those that it needs.
    """

    def on_reading(self, reading: Reading) -> None:
        """Receive a reading; one comes every `--log-interval` seconds."""

    def on_evaluation(self, evaluated: Figures) -> None:
        """Receive the results of an evaluation."""

    def on_logged(self, logged: Figures) -> None:
        """Receive the figures logged after the last reading; see also `Reading.logged`."""

    def on_event(self, event: Event) -> None:
        """Receive an event."""

    def close(self, finished: bool) -> None:
        """Release all resources; called once, also if the run or another method fails.

        Args:
            finished: whether the run finished; False if another method of this sink has failed.
        """


class _Forwarding(MetricsSink):
    """Forwards every call as the name of the method and its argument."""

    def on_reading(self, reading: Reading) -> None:
        self._forward("on_reading", reading)

    def on_evaluation(self, evaluated: Figures) -> None:
        self._forward("on_evaluation", evaluated)

    def on_logged(self, logged: Figures) -> None:
        self._forward("on_logged", logged)

    def on_event(self, event: Event) -> None:
        self._forward("on_event", event)

    def _forward(self, method: str, argument: Any) -> None:
        raise NotImplementedError


class Sinks(_Forwarding):
    """Several sinks; one that raises is closed, and never ends the training.

    Empty on a rank that does not write the files. No method is collective.
    """

    def __init__(self, sinks: Iterable[MetricsSink] = ()) -> None:
        self._sinks = list(sinks)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def event(
        self,
        kind: str,
        step: int,
        text: str,
        ranks: Sequence[int] = (),
        at: float | None = None,
        **details: Any,
    ) -> None:
        """Give all sinks an event; `at` is in seconds since 1970, None for now."""
        when = time.time() if at is None else at
        self.on_event(
            Event(step=step, time=when, kind=kind, text=text, ranks=list(ranks), details=details)
        )

    def close(self, finished: bool) -> None:
        """Close all sinks; later calls of any method do nothing."""
        self._forward("close", finished)
        self._sinks = []

    def _forward(self, method: str, argument: Any) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(argument)
            except Exception as error:
                self._sinks.remove(sink)
                _close_failed(sink, method)
                _warn_of_failure(type(sink).__name__, error)


def _close_failed(sink: MetricsSink, method: str) -> None:
    """Close a sink of which a method has failed, unless that was `close`."""
    if method != "close":
        with contextlib.suppress(Exception):  # the first failure is the one that is shown
            sink.close(False)


def _warn_of_failure(name: str, error: Exception) -> None:
    reason = (str(error).strip().splitlines() or [""])[0]
    _log.warning(
        "%s failed and receives no more metrics; training continues: %s: %s",
        name,
        type(error).__name__,
        reason,
    )
    _log.debug("its traceback:", exc_info=error)


class BackgroundSink(_Forwarding):
    """Passes everything on to another sink, which a thread creates and calls, in order.

    While that sink is busy, up to `MAX_WAITING` calls wait; beyond that, the oldest are dropped.
    The thread is a daemon: it ends with the process. `close` waits for the remaining calls, for a
    shorter time if the run did not finish.
    """

    def __init__(self, name: str, make: Callable[[], MetricsSink]) -> None:
        self._name = name
        self._make = make
        self._waiting: queue.Queue[tuple[str, Any]] = queue.Queue(MAX_WAITING)
        self._has_dropped = False
        self._thread = threading.Thread(target=self._work, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def close(self, finished: bool) -> None:
        """Wait for the remaining calls, for a limited time."""
        self._forward("close", finished)
        self._thread.join(_PATIENCE_SEC[finished])
        if self._thread.is_alive():
            _log.warning(
                "%s did not accept the last metrics within %.0f s; they may be missing there",
                self._name,
                _PATIENCE_SEC[finished],
            )

    def _forward(self, method: str, argument: Any) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((method, argument))
                return
            with contextlib.suppress(queue.Empty):  # the thread may have emptied the queue
                self._waiting.get_nowait()
                if not self._has_dropped:
                    _log.warning(
                        "%s cannot keep up; its oldest queued metrics are dropped", self._name
                    )
                self._has_dropped = True

    def _work(self) -> None:
        sink: MetricsSink | None = None
        method = ""
        try:
            sink = self._make()
            while method != "close":
                method, argument = self._waiting.get()
                getattr(sink, method)(argument)
        except Exception as error:
            if sink is not None:
                _close_failed(sink, method)
            _warn_of_failure(self._name, error)


def check_sinks(sinks: Sequence[MetricsSink]) -> None:
    """Raise a `UserError` unless every sink is a `MetricsSink`."""
    for sink in sinks:
        if not isinstance(sink, MetricsSink):
            is_class = isinstance(sink, type)
            actual = f"the class {sink.__name__}" if is_class else type(sink).__name__
            raise UserError(
                "Training(sinks=...) takes instances of subclasses of kaitian_mpi.MetricsSink, not "
                f"{actual}"
            )
