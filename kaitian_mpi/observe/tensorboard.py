"""A sink that writes TensorBoard's event files, by torch's writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaitian_mpi.observe.reading import (
    Evaluated,
    Event,
    Logged,
    Reading,
    of_evaluation,
    of_logged,
    of_reading,
)
from kaitian_mpi.observe.sink import MetricsSink

MODULE = "torch.utils.tensorboard"
FOLDER = "tensorboard"
"""The folder in the run folder."""


class TensorBoardSink(MetricsSink):
    """Writes scalars, and events as text.

    Each job of a run, and each rank that takes over, adds a file to the folder. Where steps are
    trained again, TensorBoard itself drops what earlier files have of them.

    Args:
        run_folder: the run's folder.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self._writer: Any = None

    def on_reading(self, reading: Reading) -> None:
        """Write a reading's numbers."""
        self._write(of_reading(reading), reading.step, reading.time)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Write an evaluation's numbers."""
        self._write(of_evaluation(evaluated), evaluated.step, evaluated.time)

    def on_logged(self, logged: Logged) -> None:
        """Write the user's own figures."""
        self._write(of_logged(logged), logged.step, logged.time)

    def on_event(self, event: Event) -> None:
        """Write an event as text; at a job's start, have later steps of earlier jobs dropped."""
        if event.kind in ("start", "resume"):
            self._open(purge_step=event.step + 1)
        else:
            self._open()
        self._writer.add_text(f"events/{event.kind}", event.text, event.step, event.time)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, purge_step: int | None = None) -> None:
        """Open a file, unless one is open."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def _write(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._open()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, at)
        self._writer.flush()  # a rank that is killed then leaves all it had
