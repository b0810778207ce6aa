"""All figures of a run, in the order of the report; draws those that are not about single ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kaitian_mpi.observe.report import style
from kaitian_mpi.observe.report.rank_figures import (
    draw_batch_sizes,
    draw_step_times,
    draw_utilization,
)
from kaitian_mpi.observe.report.run import RecordedEvent, RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_PANELS = 4
_MAX_MARKERS = 500
_TRAINING: dict[str, Any] = {"color": style.BLUE}
_HELD_OUT: dict[str, Any] = {"color": style.VERMILLION, "linestyle": (0, (5, 2)), "marker": "s"}
_LOGGED: dict[str, Any] = {"color": style.GREEN, "linestyle": "-.", "marker": "^"}

_JOB_EVENTS = ("start", "resume", "recovery", "stop", "finish", "exclusion")


class _EventRow(NamedTuple):
    """A row of the time line: which kinds of events it shows, and how."""

    kinds: tuple[str, ...]
    marker: str
    color: str


_EVENT_ROWS = {
    "new plan": _EventRow(("plan",), "D", style.BLUE),
    "slow rank": _EventRow(("slow",), "s", style.ORANGE),
    "lost rank": _EventRow(("loss",), "X", style.VERMILLION),
    "checkpoint": _EventRow(("checkpoint",), "o", style.GREEN),
    "bad step": _EventRow(("bad_step", "divergence"), "v", style.PURPLE),
    "job": _EventRow(_JOB_EVENTS, "|", style.BLACK),
}


def draw_learning(run: RecordedRun, title: str) -> style.Drawn:
    """Draw the loss in the first panel; each metric, and each value that the script logs, below."""
    metrics = [name for results in run.evaluations.values() for name in results if name != "loss"]
    logged = [name for interval in run.intervals for name in interval.logged]
    names = list(dict.fromkeys(metrics + logged))[: _MAX_PANELS - 1]
    losses = [(i.step, i.loss) for i in run.intervals if i.loss is not None]
    parts = []
    if losses:
        parts.append(f"training loss from {losses[0][1]:.4g} to {losses[-1][1]:.4g}")
    if run.evaluations:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(run.results.items())[:6])
        parts.append(f"held-out results at step {list(run.evaluations)[-1]}: {shown}")
    text = f"{title} over the steps: " + ("; ".join(parts) or "none yet") + "."
    if not (losses or run.evaluations or names):
        return None, text
    figure = style.new_figure(run, title, height=3.2 + 2.2 * len(names))
    panels: list[Axes] = list(figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0])
    _plot(panels[0], losses, "training", _TRAINING)
    for axes, name in zip(panels, ["loss", *names], strict=True):
        held_out = [
            (step, results[name]) for step, results in run.evaluations.items() if name in results
        ]
        logged_points = [(i.step, i.logged[name]) for i in run.intervals if name in i.logged]
        _plot(axes, held_out, "held-out", _HELD_OUT)
        _plot(axes, logged_points, "logged", _LOGGED)
        unit = "mean per sample" if axes is panels[0] else "as reported"
        style.finish_axes(axes, "step" if axes is panels[-1] else "", f"{name} ({unit})")
    style.mark_changes(panels, run, lambda change: change.step)
    return figure, text


def _plot(
    axes: Axes, points: Sequence[tuple[float, float]], name: str, line_style: dict[str, Any]
) -> None:
    """Draw a line, if there are any points; the legend shows its last value."""
    if points:
        xs, ys = zip(*points, strict=True)
        label = f"{name}: {ys[-1]:.4g}"
        axes.plot(xs, ys, **line_style, label=label, markevery=max(1, len(xs) // 30))


def draw_rate(run: RecordedRun, title: str) -> style.Drawn:
    """Draw the samples per second over time."""
    points = [(i.at_sec, i.samples_per_sec) for i in run.intervals if i.samples_per_sec]
    if not points:
        return None, "No rate is known."
    figure = style.new_figure(run, title, height=3.2)
    axes = figure.subplots()
    _plot(axes, points, "all ranks", {**_TRAINING, "marker": "o"})
    style.finish_axes(axes, style.TIME, "samples/s")
    axes.set_ylim(bottom=0)
    style.mark_changes([axes], run, lambda change: change.at_sec)
    rates = [rate for _, rate in points]
    return figure, (
        f"{title} over time: {rates[0]:,.0f} samples/s at first, {rates[-1]:,.0f} at last, "
        f"between {min(rates):,.0f} and {max(rates):,.0f}."
    )


def draw_events(run: RecordedRun, title: str) -> style.Drawn:
    """Draw the events on a time line, with a row for each type."""
    all_rows = {
        name: [event for event in run.events if event.kind in row.kinds]
        for name, row in _EVENT_ROWS.items()
    }
    rows = {name: events for name, events in all_rows.items() if events}
    if not rows:
        return None, "No event is recorded."
    figure = style.new_figure(run, title, height=1.4 + 0.35 * len(rows))
    axes = figure.subplots()
    for y, (name, events) in enumerate(rows.items()):
        _, marker, color = _EVENT_ROWS[name]
        axes.axhline(y, color=style.GRID, linewidth=0.8, zorder=0)
        if name == "slow rank":
            for event in events:
                axes.plot(_slow_period(run, event), [y, y], color=color, linewidth=6, alpha=0.45)
        xs = [event.at_sec for event in events[:: len(events) // _MAX_MARKERS + 1]]
        size = 12 if marker == "|" else 7
        axes.plot(xs, [y] * len(xs), linestyle="", marker=marker, markersize=size, color=color)
    labels = [f"{name} ({len(events)})" for name, events in rows.items()]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(left=False)
    axes.set_xlabel(style.TIME)
    counts = ", ".join(f"{name} {len(events)}" for name, events in rows.items())
    losses = [event.text for event in run.events if event.kind == "loss"][:3]
    return figure, f"{title}, by number: {counts}." + "".join(f" {text}." for text in losses)


def _slow_period(run: RecordedRun, slow: RecordedEvent) -> tuple[float, float]:
    """Return the seconds at which a rank began to be slow, and was reported again or lost."""
    ends = [
        event.at_sec
        for event in run.events
        if event.at_sec > slow.at_sec
        and event.kind in ("slow", "slow_end", "loss")
        and set(event.ranks) & set(slow.ranks)
    ]
    run_end = run.intervals[-1].at_sec if run.intervals else slow.at_sec
    return slow.at_sec, min(ends, default=max(slow.at_sec, run_end))


@dataclass(frozen=True)
class FigureSpec:
    """A figure that can be drawn of any run."""

    name: str
    """The name in files and ids."""
    title: str
    explanation: str
    """A sentence on how to read it."""
    _draw: Callable[[RecordedRun, str], style.Drawn]

    def draw(self, run: RecordedRun) -> style.Drawn:
        """Return the figure (None if there is nothing to show), and its main numbers in words.

        Raises:
            UserError: matplotlib is not installed.
        """
        with style.drawing():
            figure, text = self._draw(run, self.title)
        return figure, text + (f" {style.EMULATED}." if run.emulated else "")


FIGURES = (
    FigureSpec(
        "rate",
        "Training rate",
        "Numbers above the figure mark new plans, that is, new batch sizes, which are explained "
        "below “Batch size of each rank”.",
        draw_rate,
    ),
    FigureSpec(
        "batch-sizes",
        "Batch size of each rank",
        "The number of samples per step of each rank. Each number above marks a new plan; the "
        "table below gives its reason.",
        draw_batch_sizes,
    ),
    FigureSpec(
        "utilization",
        "Utilization of each rank",
        "The share of each step in which a rank computes; the rest is waiting for other ranks, "
        "for data and for communication. The closer all ranks are to 100%, the better the batch "
        "sizes fit the devices.",
        draw_utilization,
    ),
    FigureSpec(
        "step-phases",
        "Time of each phase of a step",
        "Means over the steps with the first plan and with the last plan. “other” is the rest of "
        "the step's time.",
        draw_step_times,
    ),
    FigureSpec(
        "learning",
        "Loss and held-out results",
        "The training loss is a mean over the steps since the last reading; held-out results are "
        "from data that the run does not train on.",
        draw_learning,
    ),
    FigureSpec(
        "events",
        "Events over time",
        "The table below describes each event in words.",
        draw_events,
    ),
)
