"""Figures of what each rank did: its utilization and its batch sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kaitian_mpi.observe.report import palette
from kaitian_mpi.observe.report.canvas import (
    MAX_LINES,
    TIME,
    End,
    finish_axes,
    label_ends,
    mark_changes,
    new_figure,
)
from kaitian_mpi.observe.report.run import Interval, PlanChange, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_COLUMNS = 240
MAX_ROWS = 250
_COMPUTING = ("forward", "backward", "optimizer", "compute")


def utilization(run: Run) -> dict[int, list[tuple[float, float]]]:
    """Return each rank's share of time spent computing, as (seconds since the start, percent)."""
    series: dict[int, list[tuple[float, float]]] = {}
    for interval in run.intervals:
        for place, rank in enumerate(interval.ranks):
            busy = busy_percent(interval, place)
            if busy is not None:
                series.setdefault(rank, []).append((interval.at_sec, busy))
    return series


def busy_percent(interval: Interval, place: int) -> float | None:
    """Return how much of its time a rank computed, in percent; None if that is not known."""
    seconds = [
        values[place]
        for phase in _COMPUTING
        if (values := interval.phases.get(phase)) and not math.isnan(values[place])
    ]
    if not seconds or interval.step_time_sec is None:
        return None
    return min(100.0, 100 * sum(seconds) / interval.step_time_sec)


def draw_utilization(run: Run) -> Figure | None:
    """Draw each rank's utilization over time."""
    title, unit = "Utilization of each rank", "computing (% of the step's time)"
    return _draw(run, utilization(run), title, unit, 100)


def describe_utilization(run: Run) -> str:
    """Describe that figure in words."""
    series = utilization(run)
    if not series:
        return "No utilization is known."
    means = {rank: sum(v for _, v in points) / len(points) for rank, points in series.items()}
    return f"Utilization of each rank over time, mean: {_list(means, '{:.0f}%')}."


def batch_series(run: Run) -> dict[int, list[tuple[float, float]]]:
    """Return each rank's batch size, as (step from which on, samples), with a last point."""
    series: dict[int, list[tuple[float, float]]] = {}
    last = run.intervals[-1].step if run.intervals else 0
    changes: list[PlanChange] = list(run.plans)
    for place, plan in enumerate(changes):
        until = changes[place + 1].step if place + 1 < len(changes) else max(last, plan.step + 1)
        for rank, samples in zip(plan.ranks, plan.batch_sizes, strict=True):
            points = series.setdefault(rank, [])
            if points and points[-1][0] < plan.step:
                points.append((plan.step, math.nan))  # it did not train in between
            if points and points[-1][0] == plan.step:
                points.pop()
            points += [(plan.step, samples), (until, samples)]
    return series


def draw_batch_sizes(run: Run) -> Figure | None:
    """Draw each rank's batch size over the steps."""
    return _draw(run, batch_series(run), "Batch size of each rank", "samples per step", None)


def describe_batch_sizes(run: Run) -> str:
    """Describe that figure in words."""
    if not run.plans:
        return "No batch sizes are known."
    first = dict(zip(run.plans[0].ranks, run.plans[0].batch_sizes, strict=True))
    last = dict(zip(run.plans[-1].ranks, run.plans[-1].batch_sizes, strict=True))
    count = len(run.plans) - 1
    again = "never planned again" if not count else f"planned again {count} time{'s' * (count > 1)}"
    text = f"Samples per step: at first {_list(first, '{:.0f}')}; {again}"
    return f"{text}; at last {_list(last, '{:.0f}')}." if count else f"{text}."


def _draw(
    run: Run,
    series: Mapping[int, Sequence[tuple[float, float]]],
    title: str,
    unit: str,
    highest: float | None,
) -> Figure | None:
    """Draw a line for each rank, or colors for many; None without any."""
    draw = _heat_map if len(series) > MAX_LINES else _lines
    return draw(run, series, title, unit, highest) if series else None


def _lines(
    run: Run,
    series: Mapping[int, Sequence[tuple[float, float]]],
    title: str,
    unit: str,
    highest: float | None,
) -> Figure:
    """Draw a line for each rank, of percents over time or, without `highest`, over the steps."""
    figure = new_figure(title, run, 3.9)
    axes = figure.subplots()
    is_step = highest is None
    for rank, points in series.items():
        style = palette.rank_style(rank)
        xs, ys = zip(*points, strict=True)
        axes.plot(
            *(xs, ys),
            drawstyle="steps-post" if is_step else "default",
            color=style.color,
            linestyle=style.line,
            linewidth=1.8,
            marker=style.marker,
            markersize=5,
            markevery=1 if is_step else max(1, len(xs) // 12),
        )
    known = [y for points in series.values() for _, y in points if not math.isnan(y)]
    finish_axes(axes, "step" if is_step else TIME, unit)
    axes.set_ylim(0, 1.05 * (highest or max(known)) or 1)
    axes.set_xlim(0, max(axes.get_xlim()[1], 1e-9))
    mark_changes([axes], run, lambda change: change.step if is_step else change.at_sec)
    label_ends(axes, _ends(run, series, "{:.0f}" if is_step else "{:.0f}%"))
    return figure


def _heat_map(
    run: Run,
    series: Mapping[int, Sequence[tuple[float, float]]],
    title: str,
    unit: str,
    highest: float | None,
) -> Figure:
    """Draw many ranks' values as colors, a row a rank."""
    import numpy as np

    figure = new_figure(title, run, 5.5)
    axes = figure.subplots()
    ranks = sorted(series)
    low = min(points[0][0] for points in series.values())
    high = max(points[-1][0] for points in series.values())
    columns = np.linspace(low, high, _MAX_COLUMNS)
    cells = np.full((len(ranks), len(columns)), np.nan)
    for row, rank in enumerate(ranks):
        xs, ys = (np.array(values) for values in zip(*series[rank], strict=True))
        known = columns <= xs[-1]
        cells[row, known] = ys[np.searchsorted(xs, columns[known], side="right") - 1]
    image = axes.imshow(
        cells,
        aspect="auto",
        cmap="cividis",
        vmin=0,
        vmax=highest,
        extent=(low, max(high, low + 1e-9), len(ranks) - 0.5, -0.5),
        interpolation="nearest" if len(ranks) <= MAX_ROWS else "antialiased",
    )
    figure.colorbar(image, ax=axes, label=unit, pad=0.01)
    is_step = highest is None
    axes.set_xlabel("step" if is_step else TIME)
    axes.set_ylabel(f"rank ({len(ranks):,} of them; blank: not training)")
    ticks = sorted({round(i * (len(ranks) - 1) / 10) for i in range(11)})
    axes.set_yticks(ticks, [str(ranks[i]) for i in ticks])
    mark_changes([axes], run, lambda change: change.step if is_step else change.at_sec)
    return figure


def _ends(run: Run, series: Mapping[int, Sequence[tuple[float, float]]], form: str) -> list[End]:
    losses = [event for event in run.events if event.kind == "loss"]
    lost = {rank for loss in losses for rank in loss.ranks}
    ends = []
    for rank, points in series.items():
        style, value = palette.rank_style(rank), points[-1][1]
        last = "lost" if rank in lost else form.format(value)
        text = f"{run.ranks.get(rank, f'rank {rank}')}: {last}"
        ends.append(End(value, text, style.color, style.line, style.marker))
    return ends


def _list(values: Mapping[int, float], form: str) -> str:
    shown = [f"rank {rank} {form.format(value)}" for rank, value in list(values.items())[:8]]
    if len(values) > 8:
        low, high = min(values.values()), max(values.values())
        return f"{len(values)} ranks, {form.format(low)} to {form.format(high)}"
    return ", ".join(shown)
