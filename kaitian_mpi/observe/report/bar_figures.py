"""The figure of what a step's time is spent on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaitian_mpi.observe.report import palette
from kaitian_mpi.observe.report.canvas import SMALL, new_figure
from kaitian_mpi.observe.report.run import Interval, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ORDER = ("data", "forward", "backward", "compute", "optimizer", "wait", "other")
_MAX_PERIODS = 3
_MIN_LABEL = 0.05
"""Of the axis: narrower parts of a bar have no number."""
_MAX_BARS = 16
"""Ranks of a period that get a bar each; more are shown as the means of their kinds."""


@dataclass(frozen=True)
class Period:
    """The steps that were trained with one plan."""

    first: int
    last: int
    step_sec: float
    phases: Mapping[str, Mapping[str, float]]
    """Mean seconds per step, by the bar's label and the phase."""


def periods(run: Run) -> list[Period]:
    """Return the steps of each plan; of many plans the first, the slowest and the last."""
    starts = [plan.step for plan in run.plans] or [0]
    found = []
    for place, start in enumerate(starts):
        end = starts[place + 1] if place + 1 < len(starts) else math.inf
        inside = [i for i in run.intervals if start < i.step - i.steps / 2 <= end and i.phases]
        period = _period(run, inside)
        if period is not None:
            found.append(period)
    if len(found) > _MAX_PERIODS:
        slowest = max(found[1:-1], key=lambda period: period.step_sec)
        found = [found[0], slowest, found[-1]]
    return found


def _period(run: Run, intervals: Sequence[Interval]) -> Period | None:
    timed = [i for i in intervals if i.step_time_sec is not None]
    steps = sum(i.steps for i in timed)
    if not steps:
        return None
    labels = _labels(run, {rank for interval in timed for rank in interval.ranks})
    values: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for interval in timed:
        for phase, seconds in interval.phases.items():
            for rank, value in zip(interval.ranks, seconds, strict=True):
                if not math.isnan(value):
                    of_label = values.setdefault(labels[rank], {})
                    of_label.setdefault(phase, []).append((value, interval.steps))
    step_sec = sum(i.seconds for i in timed) / steps
    phases = {}
    for label, of_label in values.items():
        means = {
            phase: sum(value * weight for value, weight in found) / sum(w for _, w in found)
            for phase, found in of_label.items()
        }
        rest = step_sec - sum(means.values())
        phases[label] = {**means, "other": rest} if rest > 0.01 * step_sec else means
    return Period(timed[0].step - timed[0].steps + 1, timed[-1].step, step_sec, phases)


def _labels(run: Run, ranks: Collection[int]) -> dict[int, str]:
    """Return the label of the bar to which each rank belongs: its own, or its kind's."""
    known = {rank: run.ranks[rank] for rank in sorted(ranks)}
    if len(known) <= _MAX_BARS:
        return {rank: str(info) for rank, info in known.items()}
    counts = Counter(info.kind or "all" for info in known.values())
    return {
        rank: f"{info.kind or 'all'}: mean of {counts[info.kind or 'all']:,} ranks"
        for rank, info in known.items()
    }


def draw_step_phases(run: Run) -> Figure | None:
    """Draw what each rank spent a step's time on, for the steps of each plan."""
    found = periods(run)
    if not found:
        return None
    rows = sum(len(period.phases) for period in found)
    figure = new_figure("What a step's time is spent on", run, 1.5 + 0.3 * rows + 0.5 * len(found))
    panels: list[Axes] = list(
        figure.subplots(
            len(found),
            1,
            sharex=True,
            squeeze=False,
            height_ratios=[len(period.phases) + 0.6 for period in found],
        )[:, 0]
    )
    widest = max(1e3 * sum(means.values()) for period in found for means in period.phases.values())
    for axes, period in zip(panels, found, strict=True):
        _draw_period(axes, period, widest)
    panels[-1].set_xlabel("mean time per step (ms)")
    used = {phase for period in found for means in period.phases.values() for phase in means}
    _add_phase_legend(figure, [phase for phase in _ORDER if phase in used])
    return figure


def _draw_period(axes: Axes, period: Period, widest: float) -> None:
    labels = list(period.phases)
    for row, label in enumerate(labels):
        left = 0.0
        for phase in _ORDER:
            value = 1e3 * period.phases[label].get(phase, 0.0)
            if value <= 0:
                continue
            fill = palette.PHASES[phase]
            axes.barh(
                row,
                value,
                left=left,
                height=0.74,
                color=fill.color,
                hatch=fill.hatch,
                edgecolor=palette.MUTED,
                linewidth=0.6,
            )
            if value > _MIN_LABEL * widest:
                axes.text(
                    left + value / 2,
                    row,
                    f"{value:.0f}" if value >= 10 else f"{value:.2g}",
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
                )
            left += value
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.01 * widest)
    steps = f"steps {period.first} to {period.last}"
    axes.set_title(f"{steps}: {1e3 * period.step_sec:.0f} ms per step", loc="left")
    axes.tick_params(left=False)


def _add_phase_legend(figure: Figure, used: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    names = {"compute": "forward, backward, optimizer", "wait": "wait for other ranks"}
    handles = [
        Patch(
            facecolor=palette.PHASES[phase].color,
            hatch=palette.PHASES[phase].hatch,
            edgecolor=palette.MUTED,
            label=names.get(phase, phase),
        )
        for phase in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def describe_step_phases(run: Run) -> str:
    """Describe that figure in words."""
    found = periods(run)
    if not found:
        return "No times of the ranks are known."
    texts = []
    for period in found:
        waits = [1e3 * means.get("wait", 0.0) for means in period.phases.values()]
        texts.append(
            f"steps {period.first} to {period.last}: {1e3 * period.step_sec:.0f} ms per step, of "
            f"which ranks wait {min(waits):.0f} to {max(waits):.0f} ms"
        )
    return "What each rank spends a step's time on: " + "; ".join(texts) + "."
