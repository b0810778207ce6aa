"""Figures of the run as a whole: what it learned, how fast it was, what happened to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kaitian_mpi.observe.report import palette
from kaitian_mpi.observe.report.canvas import (
    TIME,
    End,
    finish_axes,
    label_ends,
    mark_changes,
    new_figure,
)
from kaitian_mpi.observe.report.run import Event, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_PANELS = 4
_MAX_SLOW_ROWS = 6
_SHARES = ("accuracy", "acc", "precision", "recall")
_SLOW = "slow rank"
_EVENT_ROWS = {
    "new plan": (("plan",), "D", palette.BLUE),
    _SLOW: (("slow",), "s", palette.ORANGE),
    "lost rank": (("loss", "recovery"), "X", palette.VERMILLION),
    "checkpoint": (("checkpoint",), "o", palette.GREEN),
    "bad step": (("bad_step", "divergence"), "v", palette.PURPLE),
    "job": (("start", "resume", "stop", "finish", "exclusion"), "|", palette.BLACK),
}


def draw_learning(run: Run) -> Figure | None:
    """Draw the losses, and the metrics and the script's own figures in a panel each."""
    losses = [(i.step, i.loss) for i in run.intervals if i.loss is not None]
    held_out = _held_out(run, "loss")
    of_evaluations = [name for e in run.evaluations for name in e.values if name != "loss"]
    of_script = [name for i in run.intervals for name in i.logged]
    names = list(dict.fromkeys(of_evaluations + of_script))[: _MAX_PANELS - 1]
    if not losses and not held_out and not names:
        return None
    figure = new_figure("Loss and held-out results", run, 3.2 + 2.2 * len(names))
    panels: list[Axes] = list(figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0])
    ends = [
        *_draw_series(panels[0], losses, "training", palette.BLUE, "-", ""),
        *_draw_series(panels[0], held_out, "held-out", palette.VERMILLION, (0, (5, 2)), "s"),
    ]
    is_positive = all(end.y >= 0 for end in ends)
    finish_axes(panels[0], "", "loss (mean per sample)", from_zero=is_positive)
    all_ends = [ends] + [
        _draw_metric(axes, run, name) for axes, name in zip(panels[1:], names, strict=True)
    ]
    panels[-1].set_xlabel("step")
    mark_changes(panels, run, lambda change: change.step)
    for axes, ends in zip(panels, all_ends, strict=True):
        label_ends(axes, ends)
    return figure


def _draw_metric(axes: Axes, run: Run, name: str) -> list[End]:
    points = _held_out(run, name)
    is_share = (
        any(part in name.lower() for part in _SHARES)
        and bool(points)
        and all(0 <= value <= 1 for _, value in points)
    )
    form, unit, scale = ("{:.1f}%", "%", 100.0) if is_share else ("{:.4g}", "as reported", 1.0)
    points = [(step, scale * value) for step, value in points]
    logged = [(i.step, i.logged[name]) for i in run.intervals if name in i.logged]
    ends = [
        *_draw_series(axes, points, "held-out", palette.VERMILLION, (0, (5, 2)), "s", form),
        *_draw_series(axes, logged, "logged", palette.GREEN, "-.", "^"),
    ]
    finish_axes(axes, "", f"{name} ({unit})", from_zero=False)
    if is_share:
        axes.set_ylim(0, 104)
    return ends


def _held_out(run: Run, name: str) -> list[tuple[int, float]]:
    return [(e.step, e.values[name]) for e in run.evaluations if name in e.values]


def _draw_series(
    axes: Axes,
    points: Sequence[tuple[int, float]],
    name: str,
    color: str,
    line: palette.LineStyle,
    marker: str,
    form: str = "{:.4g}",
) -> list[End]:
    """Draw a line; return the label of its end, none if there is no line."""
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    axes.plot(
        *(xs, ys),
        color=color,
        linestyle=line,
        linewidth=1.8,
        marker=marker,
        markersize=5,
        markevery=max(1, len(xs) // 30),
    )
    return [End(ys[-1], f"{name}: {form.format(ys[-1])}", color, line, marker)]


def describe_learning(run: Run) -> str:
    """Describe that figure in words."""
    losses = [i.loss for i in run.intervals if i.loss is not None]
    parts = []
    if losses:
        parts.append(f"training loss from {losses[0]:.4g} to {losses[-1]:.4g}")
    if run.evaluations:
        last = run.evaluations[-1]
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(last.values.items())[:6])
        parts.append(f"held-out results at step {last.step}: {shown}")
    return "Loss and held-out results over the steps: " + ("; ".join(parts) or "none yet") + "."


def draw_rate(run: Run) -> Figure | None:
    """Draw the samples per second over time."""
    points = [(i.at_sec, i.samples_per_sec) for i in run.intervals if i.samples_per_sec]
    if not points:
        return None
    figure = new_figure("Training rate", run, 3.2)
    axes = figure.subplots()
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=palette.BLUE, linewidth=1.8, marker="o", markersize=3)
    finish_axes(axes, TIME, "samples/s")
    axes.set_ylim(0, 1.08 * max(ys))
    mark_changes([axes], run, lambda change: change.at_sec)
    label_ends(axes, [End(ys[-1], f"all ranks: {ys[-1]:,.0f}", palette.BLUE, "-", "o")])
    return figure


def describe_rate(run: Run) -> str:
    """Describe that figure in words."""
    rates = [i.samples_per_sec for i in run.intervals if i.samples_per_sec]
    if not rates:
        return "No rate is known."
    return (
        f"Training rate over time: {rates[0]:,.0f} samples/s at first, {rates[-1]:,.0f} at last, "
        f"between {min(rates):,.0f} and {max(rates):,.0f}."
    )


def event_rows(run: Run) -> dict[str, list[Event]]:
    """Return what happened, by the row of the figure; rows without anything are left out."""
    rows = {
        name: [event for event in run.events if event.kind in kinds]
        for name, (kinds, _, _) in _EVENT_ROWS.items()
    }
    slow = sorted({rank for event in rows[_SLOW] for rank in event.ranks})
    found: dict[str, list[Event]] = {}
    for name, events in rows.items():
        if name == _SLOW and len(slow) <= _MAX_SLOW_ROWS:
            for rank in slow:
                found[f"rank {rank} slow"] = [event for event in events if rank in event.ranks]
        elif events:
            found[name] = events
    return found


def draw_events(run: Run) -> Figure | None:
    """Draw what happened on a time line, a row for each sort."""
    rows = event_rows(run)
    if not rows:
        return None
    figure = new_figure("What happened when", run, 1.4 + 0.35 * len(rows))
    axes = figure.subplots()
    end = max(
        [i.at_sec for i in run.intervals] + [event.at_sec for v in rows.values() for event in v]
    )
    end = end or 1.0
    axes.set_xlim(-0.01 * end, 1.01 * end)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for row, (name, events) in enumerate(rows.items()):
        _, marker, color = _EVENT_ROWS.get(name, _EVENT_ROWS[_SLOW])
        axes.axhline(row, color=palette.GRID, linewidth=0.8, zorder=0)
        for event in events:
            if event.kind == "slow":
                until = end if event.until_sec is None else event.until_sec
                axes.plot([event.at_sec, until], [row, row], color=color, linewidth=6, alpha=0.45)
        xs, size = [event.at_sec for event in events], 12 if marker == "|" else 7
        axes.plot(xs, [row] * len(xs), linestyle="", marker=marker, markersize=size, color=color)
    axes.set_yticks(range(len(rows)), [f"{name} ({len(v)})" for name, v in rows.items()])
    axes.tick_params(left=False)
    axes.set_xlabel(TIME)
    return figure


def describe_events(run: Run) -> str:
    """Describe that figure in words."""
    rows = event_rows(run)
    if not rows:
        return "Nothing is recorded."
    counts = ", ".join(f"{name} {len(events)}" for name, events in rows.items())
    losses = [event.text for event in run.events if event.kind == "loss"][:3]
    return f"What happened when, by number: {counts}." + "".join(f" {text}." for text in losses)
