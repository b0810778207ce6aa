"""Figures of the ranks: their batch sizes, their utilization, and the phases of their steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kaitian_mpi.observe.reading import number_text
from kaitian_mpi.observe.report import style
from kaitian_mpi.observe.report.run import PHASES, Interval, RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LINES = 8
_MAX_BARS = 16
"""The most ranks with a line or bar each; for more ranks, the means of their kinds are shown."""
_NAMES = {"compute": "forward, backward, optimizer", "wait": "wait for other ranks"}

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points by rank or kind."""


def _labels(run: RecordedRun, ranks: Collection[int], most: int) -> dict[int, str]:
    """Return each rank's label: the rank itself or, if there are many ranks, its kind."""
    if len(ranks) <= most:
        return {rank: str(run.ranks[rank]) for rank in ranks}
    return {rank: f"{run.ranks[rank].kind or 'all'}: mean of its ranks" for rank in ranks}


def _means(values: Mapping[int, float], labels: Mapping[int, str]) -> dict[str, float]:
    by_label: dict[str, list[float]] = {}
    for rank, value in values.items():
        by_label.setdefault(labels[rank], []).append(value)
    return {label: fmean(label_values) for label, label_values in by_label.items()}


def utilization(run: RecordedRun) -> Series:
    """Return the shares of time spent computing, as (seconds since the start, percent)."""
    series: dict[str, list[tuple[float, float]]] = {}
    labels = _labels(run, run.ranks, _MAX_LINES)
    for interval in run.intervals:
        for label, percent in _means(interval.busy(), labels).items():
            series.setdefault(label, []).append((interval.at_sec, percent))
    return series


def batch_series(run: RecordedRun) -> Series:
    """Return the ranks' batch sizes, as (first step, samples), with a last point."""
    series: dict[str, list[tuple[float, float]]] = {}
    labels = _labels(run, run.ranks, _MAX_LINES)
    last = run.intervals[-1].step if run.intervals else 0
    for place, plan in enumerate(run.plans):
        later = run.plans[place + 1 :]
        until = later[0].step if later else max(last, plan.step + 1)
        for label, samples in _means(plan.batch_sizes, labels).items():
            points = series.setdefault(label, [])
            if points and points[-1][0] < plan.step:
                points.append((plan.step, math.nan))  # it did not train in between
            if points and points[-1][0] == plan.step:
                points.pop()
            points += [(plan.step, samples), (until, samples)]
    return series


def draw_utilization(run: RecordedRun, title: str) -> style.Drawn:
    """Draw each rank's utilization over time."""
    series = utilization(run)
    if not series:
        return None, "No utilization is known."
    means = {label: fmean(percent for _, percent in points) for label, points in series.items()}
    figure = _draw(run, series, title, is_batch=False)
    return figure, f"{title} over time, mean: {_list(means, '{:.0f}%')}."


def draw_batch_sizes(run: RecordedRun, title: str) -> style.Drawn:
    """Draw each rank's batch size over the steps."""
    if not run.plans:
        return None, "No batch sizes are known."
    labels = _labels(run, run.ranks, _MAX_LINES)
    first, last = (
        _list(_means(run.plans[place].batch_sizes, labels), "{:.0f}") for place in (0, -1)
    )
    text = f"Samples per step: at first {first}; "
    if len(run.plans) == 1:
        text += "never planned again."
    else:
        text += f"planned again {len(run.plans) - 1} times; at last {last}."
    return _draw(run, batch_series(run), title, is_batch=True), text


def _list(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{label} {form.format(value)}" for label, value in values.items())


def _draw(run: RecordedRun, series: Series, title: str, *, is_batch: bool) -> Figure:
    figure = style.new_figure(run, title, height=3.9)
    axes = figure.subplots()
    labels = _labels(run, run.ranks, _MAX_LINES)
    shown = list(dict.fromkeys(labels.values()))
    lost = {rank for event in run.events if event.kind == "loss" for rank in event.ranks}
    ended = {labels[rank] for rank in lost} if len(shown) == len(labels) else set()
    for label, points in series.items():
        xs, ys = zip(*points, strict=True)
        last = "lost" if label in ended else f"{ys[-1]:.0f}" + "%" * (not is_batch)
        axes.plot(
            xs,
            ys,
            **style.line_style(shown.index(label)),
            label=f"{label}: {last}",
            drawstyle="steps-post" if is_batch else "default",
            markevery=1 if is_batch else max(1, len(xs) // 12),
        )
    unit = "samples per step" if is_batch else "computing (% of the step's time)"
    style.finish_axes(axes, "step" if is_batch else style.TIME, unit)
    if not is_batch:
        axes.set_ylim(top=104)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    style.mark_changes([axes], run, lambda change: change.step if is_batch else change.at_sec)
    return figure


def step_times(
    run: RecordedRun, first: int = 0, last: float = math.inf
) -> dict[str, dict[str, float]]:
    """Return the mean seconds of each phase in some steps, by rank or, for many ranks, by kind."""
    intervals = [i for i in run.intervals if i.seconds and i.phases]
    intervals = [i for i in intervals if first < i.step - i.steps / 2 <= last]
    labels = _labels(run, {rank for i in intervals for rank in i.ranks}, _MAX_BARS)
    sums: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    for interval in intervals:
        for place, rank in enumerate(interval.ranks):
            label = labels[rank]
            _add(sums.setdefault(label, {}), interval, place)
            counts[label] = counts.get(label, 0) + interval.steps
    return {
        label: {name: seconds / counts[label] for name, seconds in phases.items()}
        for label, phases in sums.items()
    }


def _add(sums: dict[str, float], interval: Interval, place: int) -> None:
    """Add the seconds that a rank spent on each phase, and the rest as `other`."""
    phases = {name: interval.phases[name][place] for name in PHASES if name in interval.phases}
    measured_sec = {name: seconds for name, seconds in phases.items() if seconds is not None}
    rest = (interval.step_time_sec or 0.0) - sum(measured_sec.values())
    for name, seconds in (*measured_sec.items(), ("other", max(0.0, rest))):
        sums[name] = sums.get(name, 0.0) + seconds * interval.steps


def _periods(run: RecordedRun) -> dict[str, dict[str, dict[str, float]]]:
    """Return the step times with the first and the last plan, by title."""
    if len(run.plans) < 2:
        times = step_times(run)
        return {"all steps": times} if times else {}
    starts = [plan.step for plan in run.plans]
    periods = {
        f"steps {start + 1} to {end}": times
        for start, end in zip(starts, [*starts[1:], max(run.steps, starts[-1])], strict=True)
        if (times := step_times(run, start, end))
    }
    titles = list(periods)
    return {title: periods[title] for title in titles[:1] + titles[-1:]}


def draw_step_times(run: RecordedRun, title: str) -> style.Drawn:
    """Draw the phases of each rank's step, with the first and the last plan."""
    periods = _periods(run)
    if not periods:
        return None, "The phases of the ranks' steps are not known."
    heights = [len(times) + 0.6 for times in periods.values()]
    height = 1.5 + 0.3 * sum(heights) + 0.4 * len(periods)
    figure = style.new_figure(run, title, height=height)
    panels = figure.subplots(len(periods), 1, sharex=True, squeeze=False, height_ratios=heights)
    longest = {
        period: 1e3 * max(sum(parts.values()) for parts in times.values())
        for period, times in periods.items()
    }
    texts = []
    for axes, (period, times) in zip(panels[:, 0], periods.items(), strict=True):
        _draw_bars(axes, times, max(longest.values()))
        axes.set_title(period, loc="left")
        waits = [1e3 * parts.get("wait", 0.0) for parts in times.values()]
        texts.append(
            f"{period}: {longest[period]:.0f} ms per step, of which ranks wait "
            f"{min(waits):.0f} to {max(waits):.0f} ms"
        )
    panels[-1, 0].set_xlabel("mean time per step (ms)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure, f"Phases of each rank's step: {'; '.join(texts)}."


def _draw_bars(axes: Axes, times: Mapping[str, Mapping[str, float]], longest: float) -> None:
    left = [0.0] * len(times)
    for name, (color, hatch) in style.FILLS.items():
        widths = [1e3 * parts.get(name, 0.0) for parts in times.values()]
        if not any(widths):
            continue
        bars = axes.barh(
            range(len(times)),
            widths,
            left=left,
            height=0.74,
            color=color,
            hatch=hatch,
            edgecolor=style.MUTED,
            linewidth=0.6,
            label=_NAMES.get(name, name),
        )
        shown = [number_text(width, 3) if width > 0.05 * longest else "" for width in widths]
        box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        for text in axes.bar_label(bars, shown, label_type="center", fontsize=style.SMALL):
            text.set_bbox(box if text.get_text() else None)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.tick_params(left=False)
