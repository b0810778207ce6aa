"""A sink that writes TensorBoard's event files."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaitian_mpi.observe.reading import Evaluated, Event, Logged, Reading
from kaitian_mpi.observe.scalars import of_evaluation, of_logged, of_reading
from kaitian_mpi.observe.sink import MetricsSink

MODULE = "tensorboard.summary.writer.record_writer"
FOLDER = "tensorboard"
"""The folder in the run folder."""
_BEGINS = ("start", "resume")
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")
_FORMAT = "brain.Event:2"


class TensorBoardSink(MetricsSink):
    """Writes scalars, and events as text.

    Each job of a run, and each rank that takes over, adds a file to the folder. Where steps are
    trained again, TensorBoard itself drops what earlier files have of them.
    """

    def __init__(self, run_folder: Path) -> None:
        """Open a file.

        Args:
            run_folder: the run's folder.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._tensors: Any = tensor_pb2
        self._string_type: Any = types_pb2.DT_STRING
        self._text_metadata: Any = metadata.create_summary_metadata("", "")
        folder = run_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = RecordWriter((folder / _next_name(folder)).open("xb"))
        self._add(0, time.time(), file_version=_FORMAT)

    def read(self, reading: Reading) -> None:
        """Write a reading's numbers."""
        self._write(of_reading(reading), reading.step, reading.time)

    def evaluated(self, evaluated: Evaluated) -> None:
        """Write an evaluation's numbers."""
        self._write(of_evaluation(evaluated), evaluated.step, evaluated.time)

    def logged(self, logged: Logged) -> None:
        """Write the user's own figures."""
        self._write(of_logged(logged), logged.step, logged.time)

    def happened(self, event: Event) -> None:
        """Write an event as text; where a job begins, have later steps of earlier jobs dropped."""
        if event.kind in _BEGINS:
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(event.step + 1, event.time, session_log=log)
        text = self._tensors.TensorProto(
            dtype=self._string_type, string_val=[event.text.encode(errors="replace")]
        )
        value = self._summaries.Summary.Value(
            tag=f"events/{event.kind}", tensor=text, metadata=self._text_metadata
        )
        self._add(event.step, event.time, summary=self._summaries.Summary(value=[value]))

    def close(self, finished: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, values: Mapping[str, float], step: int, at: float) -> None:
        scalars = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._add(step, at, summary=self._summaries.Summary(value=scalars))

    def _add(self, step: int, at: float, **content: Any) -> None:
        event = self._events.Event(wall_time=at, step=step, **content)
        self._writer.write(event.SerializeToString())
        self._writer.flush()  # a rank that is killed then leaves all it had


def _next_name(folder: Path) -> str:
    """Return the name of a new file, which TensorBoard reads after the existing ones.

    It reads files in the order of their names, which begin with a time: that of a rank that takes
    over may be the same second, or an earlier one by the clock of another host.
    """
    earlier = (_NAME.match(path.name) for path in folder.iterdir())
    newest = max((int(found[1]) for found in earlier if found), default=0)
    began = max(int(time.time()), newest + 1)
    return f"events.out.tfevents.{began:010d}.{socket.gethostname()}.{os.getpid()}.0"
