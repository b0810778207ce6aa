"""Checks a timeline against the rules of the Trace Event Format."""

import itertools
import json
from collections import defaultdict
from pathlib import Path

_ROUNDING_US = 0.002


def read_trace(path: Path) -> list[dict]:
    """Return the events of a file; its closing bracket may be missing."""
    text = path.read_text()
    return json.loads(text if text.endswith("]\n") else text.removesuffix(",\n") + "]")


def spans_of(trace: list[dict]) -> list[dict]:
    return [event for event in trace if event["ph"] == "X"]


def check_trace(trace: list[dict]) -> None:
    """Check every event's fields, the names of lanes, and that the spans of a lane are nested."""
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace
        if event["name"] == "thread_name"
    }
    processes = {event["pid"] for event in trace if event["name"] == "process_name"}
    lanes = defaultdict(list)
    for event in trace:
        assert event["ph"] in set("XMiCsf"), event
        assert event["pid"] in processes, event
        assert event["ts"] >= 0, event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            lanes[event["pid"], event["tid"]].append(event)
    assert set(lanes) <= set(named)
    for lane, spans in lanes.items():
        _check_nesting(spans, named[lane])
    for name, same in collectives_of(trace).items():
        assert len({span["pid"] for span in same}) == len(same), f"{name} is there twice"


def _check_nesting(spans: list[dict], lane: str) -> None:
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start, end = span["ts"], span["ts"] + span["dur"]
        while ends and ends[-1] <= start + _ROUNDING_US:
            ends.pop()
        assert not ends or end <= ends[-1] + _ROUNDING_US, (lane, span, ends)
        ends.append(end)


def collectives_of(trace: list[dict]) -> dict[str, list[dict]]:
    """Return the spans of each collective, by its identity, in the order of ranks."""
    found = defaultdict(list)
    for span in spans_of(trace):
        if "collective" in span["args"]:
            found[span["args"]["collective"]].append(span)
    return {
        name: sorted(spans, key=lambda span: span["args"]["rank"]) for name, spans in found.items()
    }


def largest_gap_us(spans: list[dict]) -> float:
    """Return by how many microseconds two spans miss each other; below 0: all overlap."""
    return max(
        max(one["ts"], other["ts"]) - min(one["ts"] + one["dur"], other["ts"] + other["dur"])
        for one, other in itertools.combinations(spans, 2)
    )
