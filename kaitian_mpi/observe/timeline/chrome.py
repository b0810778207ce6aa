"""Writes events as Chrome's Trace Event Format, which Perfetto and chrome://tracing open.

The file is a JSON array with an event on each line. What is appended starts with the comma that
follows the line before, so that the file lacks only the closing bracket at any time; the format
makes that optional.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kaitian_mpi.observe.timeline.clock import AlignedClock
from kaitian_mpi.observe.timeline.recorder import LANES, Event, RunEvent

RUN_PID = 1_000_000
"""The process that stands for the whole run; each rank is the process of its own number."""
HEADER = "kaitian_timeline"
BEGIN, SEPARATOR, END = b"[\n", b",\n", b"\n]\n"
_FIRST_EXTRA_LANE = 100
_FLOW_MARGIN_US = 0.001  # an arrow ends inside the collective, not at its very end


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), allow_nan=False).encode()


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> bytes:
    return _line({"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args})


def header(origin: float) -> bytes:
    """Return the first line of a file.

    Args:
        origin: the Unix time at which the run's time is 0.
    """
    return _metadata(HEADER, RUN_PID, 0, version=1, origin_unix_sec=origin)


def process_lines(pid: int, name: str, position: int) -> list[bytes]:
    """Return the lines that name a process and place it among the others."""
    return [
        _metadata("process_name", pid, 0, name=name),
        _metadata("process_sort_index", pid, 0, sort_index=position),
    ]


class ChromeLanes:
    """Turns the events of one rank into lines of the file."""

    def __init__(self, rank: int) -> None:
        """Begin with no lanes.

        Args:
            rank: the world rank.
        """
        self._rank = rank
        self._numbers: dict[str, int] = {}

    def lines(self, events: Iterable[Event], clock: AlignedClock) -> list[bytes]:
        """Return the lines of these events, each new lane named before its first one."""
        lines = []
        for event in events:
            if event.lane not in self._numbers:
                lines += self._name_lane(event.lane)
            number = self._numbers[event.lane]
            start, end = (
                max(0.0, round(clock.run_time(time) * 1e6, 3)) for time in (event.start, event.end)
            )
            place = {"pid": self._rank, "tid": number}
            span = {"name": event.name, "ph": "X", "ts": start, "dur": round(end - start, 3)}
            lines.append(_line({**span, **place, "args": _finite(event.args)}))
            if (flow := event.args.get("collective")) is not None:
                lines.append(_line({**_flow(event, flow, start, end), **place}))
        return lines

    def _name_lane(self, lane: str) -> list[bytes]:
        known = LANES.index(lane) if lane in LANES else None
        number = len(self._numbers) + _FIRST_EXTRA_LANE if known is None else known
        self._numbers[lane] = number
        return [
            _metadata("thread_name", self._rank, number, name=lane),
            _metadata("thread_sort_index", self._rank, number, sort_index=number),
        ]


def status_lines(rank: int, time: float, clock: AlignedClock, dropped: int) -> list[bytes]:
    """Return the lines that say how accurate a rank's times are, and what is missing.

    Args:
        rank: the world rank.
        time: when the lines are made, by the rank's own clock, in seconds.
        clock: the rank's aligned clock.
        dropped: how many events could not be kept.
    """
    error = round(clock.error * 1e6, 1)
    place = {"ph": "i", "s": "t", "ts": round(clock.run_time(time) * 1e6, 3), "pid": rank, "tid": 0}
    known = {"error_us": error}
    if clock.drift is not None:
        known["drift_us_per_sec"] = round(clock.drift * 1e6, 1)
    lines = [
        _metadata("process_labels", rank, 0, labels=f"clock error at most {error:g} us"),
        _line({"name": "clocks aligned", **place, "args": known}),
    ]
    if dropped:
        text = f"{dropped} events are missing: too many at once"
        lines.append(_line({"name": text, **place, "args": {"dropped": dropped}}))
    return lines


def _flow(event: Event, identity: str, start: float, end: float) -> dict[str, Any]:
    """Return the end of an arrow between the same collective on several ranks.

    An arrow leads from where the group's first rank begins to where another one ends. That is
    always later: no rank ends a collective before all have begun it.
    """
    common = {"name": event.name, "cat": "collective", "id": identity}
    if event.args.get("rank") == 0:
        return {**common, "ph": "s", "ts": start}
    return {**common, "ph": "f", "bp": "e", "ts": max(start, round(end - _FLOW_MARGIN_US, 3))}


def run_lines(events: Iterable[RunEvent], clock: AlignedClock) -> list[bytes]:
    """Return the lines of what concerns the whole run: lines across all ranks, and counters."""
    lines = []
    for event in events:
        time = max(0.0, round(clock.run_time(event.time) * 1e6, 3))
        place = {"ts": time, "pid": RUN_PID if event.rank is None else event.rank, "tid": 0}
        if event.value is None:
            args = _finite(event.args)
            lines.append(_line({"name": event.name, "ph": "i", "s": "g", **place, "args": args}))
        elif math.isfinite(event.value):
            args = {event.name: event.value}
            lines.append(_line({"name": event.name, "ph": "C", **place, "args": args}))
    return lines


def origin_of(start: bytes) -> float | None:
    """Return the origin that a file's first two lines give; None if it is not a timeline."""
    try:
        event = json.loads(start.removeprefix(BEGIN).rstrip(b",\n"))
        origin = event["args"]["origin_unix_sec"] if event["name"] == HEADER else None
    except (ValueError, KeyError, TypeError):
        return None
    return float(origin) if isinstance(origin, int | float) else None


def _finite(value: Any) -> Any:
    """Return a value with infinities and NaN, which JSON cannot hold, as strings."""
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
