"""A run's `timeline.json`, in Chrome's Trace Event Format: Perfetto and chrome://tracing open it.

The file is a JSON array with an event and a comma on each line. The closing bracket, which the
format makes optional, is written last.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kaitian_mpi.observe.files import append
from kaitian_mpi.observe.reading import Event, Figures, Reading
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.clock import AlignedClock
from kaitian_mpi.observe.timeline.recorder import LANES, RUN, Recorder

NAME = "timeline.json"
RUN_PID = 1_000_000
"""The process that stands for the whole run; each rank is the process of its own number."""
_HEADER = "kaitian_timeline"
_BEGIN = b"[\n"
_SEPARATOR = b",\n"
_MAX_LINE = 1 << 20
_FIRST_EXTRA_LANE = 100
_FLOW_MARGIN_US = 0.001  # an arrow ends inside the collective, not at its very end
_log = logging.getLogger(__name__)

TraceEvent = Mapping[str, Any]


def encode(events: Iterable[TraceEvent]) -> bytes:
    """Return events as lines of the file."""
    return b"".join(_json(event) + _SEPARATOR for event in events)


def _json(event: TraceEvent) -> bytes:
    return json.dumps(_finite(event), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """Return a value with infinities and NaN, which JSON cannot hold, as strings."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> TraceEvent:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def process_events(pid: int, name: str, position: int) -> list[TraceEvent]:
    """Return the events that name a process and place it among the others."""
    return [
        _metadata("process_name", pid, 0, name=name),
        _metadata("process_sort_index", pid, 0, sort_index=position),
    ]


class ChromeLanes:
    """Turns the events of one rank into those of the file."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[str, int] = {}

    def trace(
        self, events: Iterable[recorder.TimelineEvent], clock: AlignedClock
    ) -> list[TraceEvent]:
        """Return the file's form of these events; a new lane is named before its first event."""
        traced: list[TraceEvent] = []
        for event in events:
            start, end = _micros(clock, event.start), _micros(clock, event.end)
            if event.lane == RUN:
                traced.append({"tid": 0, **event.args, "ts": start})
                continue
            if event.lane not in self._numbers:
                traced += self._name_lane(event.lane)
            place = {"pid": self._rank, "tid": self._numbers[event.lane], "name": event.name}
            duration = round(end - start, 3)
            traced.append({**place, "ph": "X", "ts": start, "dur": duration, "args": event.args})
            if (identity := event.args.get("collective")) is not None:
                # An arrow leads from the begin on the group's first rank to the end on another
                # rank, which is always later: no rank ends before all have begun.
                flow = {**place, "cat": "collective", "id": identity}
                if event.args.get("rank") == 0:
                    traced.append({**flow, "ph": "s", "ts": start})
                else:
                    before_end = max(start, round(end - _FLOW_MARGIN_US, 3))
                    traced.append({**flow, "ph": "f", "bp": "e", "ts": before_end})
        return traced

    def _name_lane(self, lane: str) -> list[TraceEvent]:
        fixed_number = LANES.index(lane) if lane in LANES else None
        number = len(self._numbers) + _FIRST_EXTRA_LANE if fixed_number is None else fixed_number
        self._numbers[lane] = number
        return [
            _metadata("thread_name", self._rank, number, name=lane),
            _metadata("thread_sort_index", self._rank, number, sort_index=number),
        ]


def status_events(rank: int, now: float, clock: AlignedClock, dropped: int) -> list[TraceEvent]:
    """Return the events that give a rank's clock error, and the number of missing events."""
    error = round(clock.error * 1e6, 1)
    mark = {"ph": "i", "s": "t", "ts": _micros(clock, now), "pid": rank, "tid": 0}
    events: list[TraceEvent] = [
        _metadata("process_labels", rank, 0, labels=f"clock error at most {error:g} us"),
        {**mark, "name": "clocks aligned", "args": {"error_us": error}},
    ]
    if dropped:
        events.append({**mark, "name": f"{dropped} events are missing: too many at once"})
    return events


def _micros(clock: AlignedClock, time: float) -> float:
    return max(0.0, round(clock.run_time(time) * 1e6, 3))


class TimelineSink(MetricsSink):
    """Records counters of the readings, and a line across all ranks at each event."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._batch_sizes: dict[int, int] = {}

    def on_reading(self, reading: Reading) -> None:
        self._count(reading.time, RUN_PID, "samples/s", reading.samples_per_sec)
        self._count(reading.time, RUN_PID, "loss", reading.loss)
        for rank, size in zip(reading.ranks, reading.batch_sizes, strict=True):
            if self._batch_sizes.get(rank) != size:  # only changes, as there may be many ranks
                self._count(reading.time, rank, "batch size", size)
                self._batch_sizes[rank] = size

    def on_evaluation(self, evaluated: Figures) -> None:
        self._mark(evaluated.time, "evaluation", evaluated.step, evaluated.values)

    def on_event(self, event: Event) -> None:
        args = {"text": event.text, "ranks": list(event.ranks), **event.details}
        self._mark(event.time, event.kind.replace("_", " "), event.step, args)

    def _count(self, at: float, pid: int, name: str, value: float) -> None:
        if math.isfinite(value):
            self._add(at, {"ph": "C", "pid": pid, "name": name, "args": {name: value}})

    def _mark(self, at: float, name: str, step: int, args: Mapping[str, Any]) -> None:
        event = {"ph": "i", "s": "g", "pid": RUN_PID, "args": {"step": step, **args}}
        self._add(at, {**event, "name": f"{name} (step {step})"})

    def _add(self, at: float, trace: TraceEvent) -> None:
        now = self._recorder.now() - (time.time() - at)
        self._recorder.add(RUN, "", now, now, trace)


class TimelineFile:
    """A timeline on disk, to which one rank at a time appends; it opens after every call.

    Lines that cannot be written, for example to a full disk, are dropped with a warning.
    """

    def __init__(self, folder: Path, origin: float) -> None:
        """Continue the folder's timeline, or create one whose time is 0 at a Unix time."""
        self._path = folder / NAME
        self._is_faulty = False
        self.origin = self._continue() or origin
        """The Unix time at which the file's time is 0: when its first job began."""
        self.append(b"")

    def finish(self) -> None:
        """Complete the array; a job that resumes the run continues it."""
        self.append(_json(_metadata("complete", RUN_PID, 0)) + b"\n]\n")

    def _continue(self) -> float | None:
        """Make an earlier job's file ready to append to; return its origin.

        A file that is not a timeline is renamed to `timeline.json.old`.
        """
        try:
            with self._path.open("rb+") as file:
                begin = file.readline(_MAX_LINE)
                header = file.readline(_MAX_LINE)
                origin = _origin(header) if begin == _BEGIN else None
                if origin is not None:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - _MAX_LINE))
                    tail = file.read()
                    # A job that was killed may have written a part of its last line.
                    complete = tail.rfind(_SEPARATOR) + len(_SEPARATOR)
                    file.truncate(size - len(tail) + complete)
                    return origin
            self._path.replace(self._path.with_suffix(".json.old"))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(error)
        return None

    def append(self, lines: bytes) -> None:
        try:
            if not (self._path.exists() and self._path.stat().st_size):
                header = _metadata(_HEADER, RUN_PID, 0, version=1, origin_unix_sec=self.origin)
                lines = _BEGIN + encode([header, *process_events(RUN_PID, "run", -1)]) + lines
            append(self._path, lines)
        except OSError as error:
            self._warn(error)
        else:
            self._is_faulty = False

    def _warn(self, error: OSError) -> None:
        if not self._is_faulty:  # once, not every few seconds
            reason = error.strerror or error
            _log.warning(
                "%s could not be written: %s; training continues, with gaps in the timeline",
                self._path,
                reason,
            )
        self._is_faulty = True


def _origin(header: bytes) -> float | None:
    """Return the origin in a file's header; None if it is not a timeline's header."""
    try:
        event = json.loads(header.removesuffix(_SEPARATOR))
        return float(event["args"]["origin_unix_sec"]) if event["name"] == _HEADER else None
    except (ValueError, KeyError, TypeError):
        return None
