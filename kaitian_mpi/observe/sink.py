"""What receives the metrics of a run: a sink, and several of them that never fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from kaitian_mpi.observe.reading import Evaluated, Event, Logged, Reading

_log = logging.getLogger(__name__)


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
