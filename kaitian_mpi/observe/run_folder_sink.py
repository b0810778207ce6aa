"""The sink that is always there: metrics.jsonl and events.jsonl in the run folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from kaitian_mpi.observe.reading import Evaluated, Event, Logged, Reading
from kaitian_mpi.observe.sink import MetricsSink

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
_NOT_KEPT = ("epochs", "epoch_fraction", "steps", "seconds_left")  # shown while training


class LinesFolder(Protocol):
    """What the sink needs from a run folder."""

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to a JSON lines file."""


class RunFolderSink(MetricsSink):
    """Appends a line to a file for everything it receives; a full disk only loses lines."""

    def __init__(self, folder: LinesFolder) -> None:
        self._folder = folder

    def read(self, reading: Reading) -> None:
        """Append a line to metrics.jsonl."""
        line = {
            name: value
            for name, value in asdict(reading).items()
            if name not in _NOT_KEPT and value is not None
        }
        if not reading.logged:
            del line["logged"]
        self._folder.append(METRICS, line)

    def evaluated(self, evaluated: Evaluated) -> None:
        """Append a line to metrics.jsonl."""
        line = asdict(evaluated)
        line["validation"] = line.pop("values")
        self._folder.append(METRICS, line)

    def logged(self, logged: Logged) -> None:
        """Append a line to metrics.jsonl."""
        line = asdict(logged)
        line["logged"] = line.pop("values")
        self._folder.append(METRICS, line)

    def happened(self, event: Event) -> None:
        """Append a line to events.jsonl."""
        self._folder.append(EVENTS, asdict(event))
