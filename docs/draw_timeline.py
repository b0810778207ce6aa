"""Draws some steps of a timeline, as in docs/timeline.md.

    python docs/draw_timeline.py runs/one/timeline.json 20 step.png
    python docs/draw_timeline.py runs/one/timeline.json 20-25 steps.png

In the first, a rank has a row for its phases, one for its collectives, and one for what crosses
between kinds of devices, if it has that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kaitian_mpi.observe.report.style import (
    BLACK,
    BLUE,
    EMULATED,
    FILLS,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    VERMILLION,
    WIDTH,
    drawing,
)

Span = dict[str, Any]

_PHASES = {
    "getting a batch": FILLS["data"],
    "forward": FILLS["forward"],
    "backward": FILLS["backward"],
    "the sum of gradients": (ORANGE, "--"),
    "the optimizer": FILLS["optimizer"],
    "reporting the step": (PURPLE, "..."),
    "evaluation": ("#BBBBBB", "///"),
    "recovery": (VERMILLION, "xx"),
}
_COMMUNICATION = {
    "wait for all ranks": FILLS["wait"],
    "all_reduce": (BLUE, ""),
    "reduce in the group": ("#7FB2D6", "///"),
    "gather in the group": ("#BFD9EA", "\\\\\\"),
    "exchange": (GREEN, "..."),
}
_LANES = {"main": "phases", "collectives": "collectives", "relay: MPI": "between kinds"}
_EVENTS = {"plan": ":", "loss": "-", "recovery": "--", "slow": "-."}
_ROW_INCHES = 0.27
_BAR = 0.86


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a timeline, whose closing bracket may be missing."""
    text = path.read_text()
    events: list[dict[str, Any]] = json.loads(
        text if text.endswith("]\n") else text.removesuffix(",\n") + "]"
    )
    return events


def draw(trace: Sequence[dict[str, Any]], first: int, last: int) -> Figure:
    """Return the figure of some steps; of several, only phases and events are shown.

    Args:
        trace: the events.
        first: the first step.
        last: the last one.
    """
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    if first < last:
        lanes = {place: lane for place, lane in lanes.items() if lane == "main"}
    spans = [e for e in trace if e["ph"] == "X" and (e["pid"], e["tid"]) in lanes]
    own = [span for span in spans if first <= span["args"].get("step", -1) <= last]
    if not own:
        raise SystemExit(f"steps {first} to {last} were not recorded")
    start = min(span["ts"] for span in own)
    end = max(span["ts"] + span["dur"] for span in own)
    shown = [span for span in spans if span["ts"] < end and span["ts"] + span["dur"] > start]
    rows = rows_of(shown, lanes)
    with drawing():
        which = f"Step {first}" if first == last else f"Steps {first} to {last}"
        figure = Figure(
            (WIDTH, 1.7 + _ROW_INCHES * len(rows)), layout="constrained", facecolor="white"
        )
        emulated = any("emulated" in name for name in names.values())
        title = f"{which} on all ranks" + f" · {EMULATED}" * emulated
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        axes = figure.add_subplot()
        for place, (rank, lane) in enumerate(rows):
            in_row = [s for s in shown if (s["pid"], lanes[s["pid"], s["tid"]]) == (rank, lane)]
            draw_row(axes, place, in_row, start)
        finish(axes, rows, names, (end - start) / 1e3)
        if first < last:
            mark_events(axes, [e for e in trace if e["ph"] == "i" and e["s"] == "g"], start, end)
        add_legends(figure, shown)
    return figure


def mark_events(axes: Axes, events: Sequence[dict[str, Any]], start: float, end: float) -> None:
    """Draw a line across all ranks at each plan, loss and recovery."""
    for event in events:
        kind = event["name"].partition(" (")[0]
        if not start <= event["ts"] <= end or kind not in _EVENTS:
            continue
        at = (event["ts"] - start) / 1e3
        axes.axvline(at, color=BLACK, linestyle=_EVENTS[kind], linewidth=1.2)
        axes.annotate(
            kind,
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )


def rows_of(spans: Sequence[Span], lanes: dict[tuple[int, int], str]) -> list[tuple[int, str]]:
    """Return the rows that have something to show, by rank and lane."""
    found = {(span["pid"], lanes[span["pid"], span["tid"]]) for span in spans}
    order = list(_LANES)
    return sorted(
        (row for row in found if row[1] in _LANES), key=lambda r: (r[0], order.index(r[1]))
    )


def draw_row(axes: Axes, place: int, spans: Sequence[Span], start: float) -> None:
    """Draw a row's spans, the long ones below those inside them."""
    for span in sorted(spans, key=lambda span: -span["dur"]):
        if (fill := {**_PHASES, **_COMMUNICATION}.get(span["name"])) is None:
            continue
        color, hatch = fill
        axes.broken_barh(
            [((span["ts"] - start) / 1e3, span["dur"] / 1e3)],
            (place - _BAR / 2, _BAR),
            facecolor=color,
            hatch=hatch,
            edgecolor=MUTED,
            linewidth=0.4,
        )


def finish(
    axes: Axes, rows: Sequence[tuple[int, str]], names: dict[int, str], length: float
) -> None:
    """Name the rows, and draw a line between two ranks."""
    labels = []
    for place, (rank, lane) in enumerate(rows):
        is_first = place == 0 or rows[place - 1][0] != rank
        name = names[rank].replace(", emulated", "")
        labels.append(f"{name}: {_LANES[lane]}" if is_first else _LANES[lane])
        if is_first and place:
            axes.axhline(place - 0.5, color=MUTED, linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, length)
    axes.set_xlabel("time since the step began on the first rank (ms)")
    axes.tick_params(axis="y", length=0)


def add_legends(figure: Figure, spans: Sequence[Span]) -> None:
    """Explain the colors and hatches of what is shown."""
    seen = {span["name"] for span in spans}
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor=MUTED, label=name)
        for name, (color, hatch) in {**_PHASES, **_COMMUNICATION}.items()
        if name in seen
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)


def main() -> None:
    """Draw steps to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timeline", type=Path)
    parser.add_argument("steps", help="such as 20, or 20-25 for the phases of several")
    parser.add_argument("out", type=Path, help=f"a .png or .svg, {WIDTH:g} inches wide")
    options = parser.parse_args()
    first, _, last = options.steps.partition("-")
    figure = draw(read_trace(options.timeline), int(first), int(last or first))
    with drawing():
        figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
