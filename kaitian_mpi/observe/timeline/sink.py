"""Adds what concerns the whole run to its timeline: rates, losses, plans, lost ranks."""

from __future__ import annotations

import time

from kaitian_mpi.observe.reading import Evaluated, Event, Reading
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.timeline.recorder import Recorder, RunEvent


class TimelineSink(MetricsSink):
    """Counters of the readings, and a line across all ranks at each event."""

    def __init__(self, recorder: Recorder) -> None:
        """Add to a recorder of this rank."""
        self._recorder = recorder
        self._batch_sizes: dict[int, int] = {}

    def on_reading(self, reading: Reading) -> None:
        """Add the rate and the loss, and the ranks' batch sizes."""
        for name, value in (("samples/s", reading.samples_per_sec), ("loss", reading.loss)):
            self._add(reading.time, name, value=value)
        for rank, size in zip(reading.ranks, reading.batch_sizes, strict=True):
            if self._batch_sizes.get(rank) != size:  # with many ranks, all would be many
                self._add(reading.time, "batch size", value=size, rank=rank)
                self._batch_sizes[rank] = size

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Add the results on the held-out samples."""
        args = {"step": evaluated.step, **evaluated.values}
        self._add(evaluated.time, f"evaluation (step {evaluated.step})", args=args)

    def on_event(self, event: Event) -> None:
        """Add an event."""
        args = {"text": event.text, "step": event.step, "ranks": list(event.ranks)}
        name = event.kind.replace("_", " ")
        self._add(event.time, f"{name} (step {event.step})", args={**args, **event.details})

    def _add(self, at: float, name: str, **known: object) -> None:
        """Add what happened at a Unix time."""
        now = self._recorder.now() - (time.time() - at)
        self._recorder.add_run_event(RunEvent(now, name, **known))  # type: ignore[arg-type]
