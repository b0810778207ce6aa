"""The lines of metrics.jsonl: parsed, as few as a figure can show, and when they were written."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kaitian_mpi.observe.report.json_values import named_numbers, number, numbers, whole, wholes
from kaitian_mpi.observe.report.run import PHASES, Evaluation

MAX_READINGS = 1000
_MAX_POINTS = 120  # if all have the same time
_MAX_VALUES = 300_000  # readings x ranks
_MIN_READINGS = 50
_MAX_EVALUATIONS = 5000
_MAX_RANKS = 1 << 17
_MAX_SPAN_SEC = 10 * 365 * 86400.0
_OWN_PHASES = tuple(phase for phase in PHASES if phase != "compute")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A line about steps that were trained, or several lines merged."""

    step: int
    steps: int
    time: float | None
    total_steps: int | None
    epoch: int | None
    loss: float | None
    learning_rate: float | None
    samples_per_sec: float | None
    step_time_sec: float | None
    ranks: tuple[int, ...]
    """World ranks; empty if the line does not name them."""
    size: int
    """The number of ranks."""
    batch_sizes: tuple[int, ...] | None
    phases: Mapping[str, tuple[float, ...]]
    logged: Mapping[str, float]


@dataclass
class Metrics:
    """What metrics.jsonl holds."""

    readings: list[Reading]
    evaluations: list[tuple[Evaluation, float | None]]
    """Each with its unix time; its `at_sec` is not known yet."""
    damaged_lines: int
    lines: int


def parse_metrics(lines: Iterable[dict[str, Any] | None]) -> Metrics:
    """Parse the lines of metrics.jsonl, merging neighbours where there are very many.

    Args:
        lines: the objects; None for a line that could not be read.
    """
    found = Metrics([], [], 0, 0)
    readings: list[Reading] = []
    for line in lines:
        found.lines += 1
        step = None if line is None else whole(line.get("step"))
        if line is None or step is None:
            found.damaged_lines += 1
            continue
        if "validation" in line:
            values = named_numbers(line["validation"])
            if len(found.evaluations) >= _MAX_EVALUATIONS:
                del found.evaluations[::2]
            if values:
                evaluation = Evaluation(step=step, at_sec=0.0, values=values)
                found.evaluations.append((evaluation, number(line.get("time"))))
            continue
        # What a resume has trained again replaces what came before.
        while readings and readings[-1].step >= step:
            readings.pop()
        readings.append(_parse(line, step, step - (readings[-1].step if readings else 0)))
        if len(readings) >= 2 * max_readings(readings[-1].size):
            readings = _halve(readings)
    while len(readings) > max_readings(max((reading.size for reading in readings), default=0)):
        halved = _halve(readings)
        if len(halved) == len(readings):
            break
        readings = halved
    found.readings = _smooth(readings)
    return found


def _smooth(readings: Sequence[Reading]) -> list[Reading]:
    """Merge very short readings, such as those at the end of an epoch, with their neighbors."""
    least = sum(map(_seconds, readings)) / _MAX_POINTS
    found: list[Reading] = []
    for place, reading in enumerate(readings):
        last = found[-1] if found else None
        is_short = last is not None and _seconds(last) < least
        is_short_end = place == len(readings) - 1 and _seconds(reading) < least
        if last is not None and (is_short or is_short_end) and _have_one_plan(last, reading):
            found[-1] = _merge(last, reading)
        else:
            found.append(reading)
    return found


def _have_one_plan(first: Reading, second: Reading) -> bool:
    return _are_alike(first, second) and first.batch_sizes == second.batch_sizes


def _seconds(reading: Reading) -> float:
    return (reading.step_time_sec or 0.0) * reading.steps


def max_readings(ranks: int) -> int:
    """Return how many readings of this many ranks are kept."""
    return max(_MIN_READINGS, min(MAX_READINGS, _MAX_VALUES // max(1, ranks)))


def _parse(line: dict[str, Any], step: int, steps: int) -> Reading:
    ranks = wholes(line.get("ranks")) or ()
    batch_sizes = wholes(line.get("batch_sizes")) or None
    compute, wait = numbers(line.get("compute_time_sec")), numbers(line.get("wait_time_sec"))
    size = len(ranks) or len(batch_sizes or compute or wait or ())
    if size > _MAX_RANKS or len(set(ranks)) < len(ranks):
        ranks, size = (), 0
    phases = {
        phase: values
        for phase in _OWN_PHASES
        if (values := numbers(line.get(f"{phase}_time_sec"), size)) is not None
    }
    if not {"forward", "backward"} <= set(phases):
        for phase in ("forward", "backward", "optimizer"):
            phases.pop(phase, None)
        if compute is not None and len(compute) == size:
            phases["compute"] = compute
    return Reading(
        step=step,
        steps=max(1, steps),
        time=number(line.get("time")),
        total_steps=whole(line.get("total_steps")),
        epoch=whole(line.get("epoch")),
        loss=number(line.get("loss")),
        learning_rate=number(line.get("learning_rate")),
        samples_per_sec=_positive(line.get("samples_per_sec")),
        step_time_sec=_positive(line.get("step_time_sec")),
        ranks=ranks,
        size=size,
        batch_sizes=batch_sizes if batch_sizes and len(batch_sizes) == size else None,
        phases=phases,
        logged=named_numbers(line.get("logged")),
    )


def _positive(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and found > 0 else None


def _halve(readings: Sequence[Reading]) -> list[Reading]:
    """Merge each pair of neighbours that are about the same ranks."""
    halved: list[Reading] = []
    i = 0
    while i < len(readings):
        pair = readings[i : i + 2]
        if len(pair) == 2 and _are_alike(*pair):
            halved.append(_merge(*pair))
            i += 2
        else:
            halved.append(pair[0])
            i += 1
    return halved


def _are_alike(first: Reading, second: Reading) -> bool:
    return (first.ranks, first.size, set(first.phases)) == (
        second.ranks,
        second.size,
        set(second.phases),
    )


def _merge(first: Reading, second: Reading) -> Reading:
    """Return the means over both, weighted by their steps."""
    a, b = first.steps, second.steps
    mean = _weighted_mean(a, b)
    mean_rate = _weighted_mean(_seconds(first) or a, _seconds(second) or b)
    return replace(
        second,
        steps=a + b,
        loss=mean(first.loss, second.loss),
        samples_per_sec=mean_rate(first.samples_per_sec, second.samples_per_sec),
        step_time_sec=mean(first.step_time_sec, second.step_time_sec),
        phases={
            phase: _mean_of_all(
                first.phases[phase], second.phases[phase], first.steps, second.steps
            )
            for phase in second.phases
        },
        logged={**first.logged, **second.logged},
    )


def _weighted_mean(
    first_weight: float, second_weight: float
) -> Callable[[float | None, float | None], float | None]:
    def mean(a: float | None, b: float | None) -> float | None:
        if a is None or b is None:
            return b if a is None else a
        return _mean_of_known(a, b, first_weight, second_weight)

    return mean


def _mean_of_all(
    first: Sequence[float], second: Sequence[float], first_weight: float, second_weight: float
) -> tuple[float, ...]:
    whole_weight = first_weight + second_weight
    a, b = first_weight / whole_weight, second_weight / whole_weight
    means = tuple(x * a + y * b for x, y in zip(first, second, strict=True))
    if not math.isnan(sum(means)):
        return means
    pairs = zip(first, second, strict=True)
    return tuple(_mean_of_known(x, y, first_weight, second_weight) for x, y in pairs)


def _mean_of_known(a: float, b: float, first_weight: float, second_weight: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return (a * first_weight + b * second_weight) / (first_weight + second_weight)


class Clock:
    """Converts unix times and steps to seconds since the run's start."""

    def __init__(
        self, readings: Sequence[Reading], times: Iterable[float], job_starts: Iterable[float]
    ) -> None:
        """Find the start and the pauses.

        Args:
            readings: by step. Where most have no time, time is added up from the steps' times.
            times: unix times of all else that is known.
            job_starts: unix times at which a job started.
        """
        own = [reading.time for reading in readings if reading.time is not None]
        known = sorted([*own, *times])
        sane = bool(known) and known[-1] - known[0] < _MAX_SPAN_SEC and known[0] > 0
        self.has_times = sane and len(own) >= 0.5 * len(readings)
        self._zero = known[0] if known else 0.0
        if readings and own and known[0] == own[0]:  # nothing tells when the first step began
            self._zero -= _seconds(readings[0])
        self._pauses = _pauses(known, sorted(job_starts)) if self.has_times else []
        self._steps = [0]
        self._at = [0.0]
        for reading in readings:
            at = self._at[-1] + _seconds(reading)
            if self.has_times:
                known_at = self.at(reading.time) if reading.time is not None else self._at[-1]
                at = max(self._at[-1], known_at if known_at is not None else 0.0)
            self._steps.append(reading.step)
            self._at.append(at)

    def at(self, time: float | None) -> float | None:
        """Return a unix time in seconds since the start; None if this run has no times."""
        if time is None or not self.has_times:
            return None
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


def _pauses(known: Sequence[float], starts: Sequence[float]) -> list[tuple[float, float]]:
    """Return the start of each later job, and how long nothing ran before it."""
    pauses = []
    for start in starts:
        before = bisect.bisect_left(known, start)
        if before > 0:
            pauses.append((start, start - known[before - 1]))
    return pauses
