"""The lines of metrics.jsonl: parsed, as few as a figure can show, and when they were written."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kaitian_mpi.observe.report.json_values import named_numbers, number, numbers, whole, wholes
from kaitian_mpi.observe.report.run import PHASES, Evaluation, Interval

MAX_READINGS = 1000
_MAX_POINTS = 120  # if all have the same time
_MAX_VALUES = 300_000  # readings x ranks
_MIN_READINGS = 50
_MAX_EVALUATIONS = 5000


@dataclass
class Metrics:
    """What metrics.jsonl holds. The `at_sec` are unix times until a clock changes them."""

    intervals: list[Interval] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    damaged_lines: int = 0
    lines: int = 0


def parse_metrics(lines: Iterable[dict[str, Any] | None]) -> Metrics:
    """Parse the lines of metrics.jsonl, merging neighbors if there are very many.

    Args:
        lines: the objects; None for a line that could not be read.
    """
    found = Metrics()
    intervals: list[Interval] = []
    for line in lines:
        found.lines += 1
        step = None if line is None else whole(line.get("step"))
        time = None if line is None else number(line.get("time"))
        if line is None or step is None or time is None:
            found.damaged_lines += 1
        elif "validation" in line:
            if len(found.evaluations) >= _MAX_EVALUATIONS:
                del found.evaluations[::2]
            if values := named_numbers(line["validation"]):
                found.evaluations.append(Evaluation(step=step, at_sec=time, values=values))
        else:
            # What a resume has trained again replaces what came before.
            while intervals and intervals[-1].step >= step:
                intervals.pop()
            steps = step - (intervals[-1].step if intervals else 0)
            intervals.append(_parse(line, step, max(1, steps), time))
            if len(intervals) >= 2 * max_readings(len(intervals[-1].ranks)):
                intervals = _merge_pairs(intervals)
    most = max((len(each.ranks) for each in intervals), default=0)
    while len(intervals) > max_readings(most):
        merged = _merge_pairs(intervals)
        if len(merged) == len(intervals):
            break
        intervals = merged
    found.intervals = _merge_short(intervals)
    return found


def max_readings(ranks: int) -> int:
    """Return how many readings of this many ranks are kept."""
    return max(_MIN_READINGS, min(MAX_READINGS, _MAX_VALUES // max(1, ranks)))


def _parse(line: dict[str, Any], step: int, steps: int, time: float) -> Interval:
    ranks = wholes(line.get("ranks")) or ()
    if len(set(ranks)) < len(ranks):
        ranks = ()
    found = {phase: numbers(line.get(f"{phase}_time_sec"), len(ranks)) for phase in PHASES}
    phases = {phase: values for phase, values in found.items() if values is not None}
    # The compute time is the sum of these three, of which all or none are measured.
    parts = ("compute",) if "forward" in phases else ("forward", "backward", "optimizer")
    batch_sizes = wholes(line.get("batch_sizes")) or ()
    return Interval(
        step=step,
        steps=steps,
        at_sec=time,
        loss=number(line.get("loss")),
        samples_per_sec=_positive(line.get("samples_per_sec")),
        step_time_sec=_positive(line.get("step_time_sec")),
        ranks=ranks,
        batch_sizes=batch_sizes if len(batch_sizes) == len(ranks) else (),
        phases={phase: values for phase, values in phases.items() if phase not in parts},
        logged=named_numbers(line.get("logged")),
    )


def _positive(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and found > 0 else None


def _merge_short(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge very short readings, such as those at the end of an epoch, with their neighbors."""
    least = sum(each.seconds for each in intervals) / _MAX_POINTS
    found: list[Interval] = []
    for place, interval in enumerate(intervals):
        last = found[-1] if found else None
        is_end = place == len(intervals) - 1
        is_short = last is not None and (
            last.seconds < least or (is_end and interval.seconds < least)
        )
        if last is not None and is_short and last.batch_sizes == interval.batch_sizes:
            found[-1:] = _merge(last, interval)
        else:
            found.append(interval)
    return found


def _merge_pairs(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge each pair of neighbors that are about the same ranks."""
    merged: list[Interval] = []
    for i in range(0, len(intervals) - 1, 2):
        merged += _merge(intervals[i], intervals[i + 1])
    return merged + list(intervals[len(intervals) // 2 * 2 :])


def _merge(first: Interval, second: Interval) -> list[Interval]:
    """Return the means over both, weighted by their steps; both if their ranks differ."""
    if (first.ranks, set(first.phases)) != (second.ranks, set(second.phases)):
        return [first, second]
    a, b = first.steps, second.steps
    phases = {
        phase: tuple(
            math.nan if (mean := _mean(x, y, a, b)) is None else mean
            for x, y in zip(first.phases[phase], values, strict=True)
        )
        for phase, values in second.phases.items()
    }
    rates = first.samples_per_sec, second.samples_per_sec
    merged = replace(
        second,
        steps=a + b,
        loss=_mean(first.loss, second.loss, a, b),
        samples_per_sec=_mean(*rates, first.seconds or a, second.seconds or b),
        step_time_sec=_mean(first.step_time_sec, second.step_time_sec, a, b),
        phases=phases,
        logged={**first.logged, **second.logged},
    )
    return [merged]


def _mean(x: float | None, y: float | None, a: float, b: float) -> float | None:
    """Return the mean weighted by a and b; of one alone if the other is not known."""
    if x is None or math.isnan(x):
        return y
    if y is None or math.isnan(y):
        return x
    return (a * x + b * y) / (a + b)


class Clock:
    """The seconds since the run's start, without the time in which no job ran."""

    def __init__(
        self, intervals: Sequence[Interval], times: Sequence[float], job_starts: Sequence[float]
    ) -> None:
        """Find the start and the pauses.

        Args:
            intervals: by step, at unix times.
            times: unix times of all else that is known.
            job_starts: unix times at which a job started.
        """
        own = [interval.at_sec for interval in intervals]
        known = sorted([*own, *times])
        self._zero = known[0] if known else 0.0
        if own and known[0] == own[0]:  # nothing tells when the first step began
            self._zero -= intervals[0].seconds
        self._pauses = [
            (start, start - known[before - 1])
            for start in sorted(job_starts)
            if (before := bisect.bisect_left(known, start)) > 0
        ]
        self._steps, self._at = [0], [0.0]
        for interval in intervals:
            self._steps.append(interval.step)
            self._at.append(max(self._at[-1], self.at(interval.at_sec)))

    def at(self, time: float) -> float:
        """Return a unix time in seconds since the start."""
        paused = sum(length for start, length in self._pauses if start <= time)
        return max(0.0, time - self._zero - paused)

    def at_step(self, step: int) -> float:
        """Return when a step ended, interpolated between readings."""
        right = bisect.bisect_left(self._steps, step)
        if right == len(self._steps):
            return self._at[-1]
        if self._steps[right] == step or right == 0:
            return self._at[right]
        low, high = self._steps[right - 1], self._steps[right]
        part = (step - low) / (high - low)
        return self._at[right - 1] + part * (self._at[right] - self._at[right - 1])
