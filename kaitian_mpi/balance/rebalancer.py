"""Decides during training when and how to change the batch sizes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from kaitian_mpi.balance import portable_math
from kaitian_mpi.balance.cost_model import MIN_SLOPE, CostTable, RankCost
from kaitian_mpi.balance.fastest_split import plan_fastest

MAX_GROWTH = 2.0  # a batch that grows more may not fit in memory, which would end the job
_MIN_GAIN = 0.05
_MIN_GAIN_OF_REFINING = 0.02
_STEPS_BETWEEN = 5  # so that a plan is judged by its own steps before it is replaced
_STEPS_TO_REFINE = 10
_WAIT_WINDOW = 10
_STANDARD_ERRORS = 2.5
_WINDOW = 30
_NEWEST = 3
_MIN_CHANGE = 0.1  # change of the logarithm: about 10%
_INITIAL_NOISE = 0.1
_APART = 1.25  # least ratio of two shares from which alpha and beta are fitted
# For normally distributed errors: the median of the differences of neighbors in standard
# deviations, and a median's standard error relative to that of a mean.
MEDIAN_DIFFERENCE = 0.954
_MEDIAN_ERROR = 1.253
_NO_VALUE = 1e300  # sorts after all values


@dataclass(frozen=True)
class RankSteps:
    """All ranks' times of a step, as arrays with one entry per rank. Seconds are per step.

    In a job of thousands of ranks, an object for each would take longer than a short step.
    """

    steps: np.ndarray
    """The number of steps averaged; 0 if the device has not finished one yet."""
    samples: np.ndarray
    work_sec: np.ndarray
    """Time to get the batch and compute, without waiting for other ranks."""
    wait_sec: np.ndarray
    """Time spent only waiting for communication."""


@dataclass(frozen=True)
class NewPlan:
    """New batch sizes, with their estimated gain and the reason for the change."""

    batch_sizes: list[int]
    gain: float
    """Estimated gain in throughput: 0.5 for 1.5 times the throughput."""
    factors: list[float]
    """Each rank's compute time relative to its cost model."""
    rank: int
    """The rank whose speed has changed most since the previous plan."""
    reason: str
    """The change of that rank's speed, and the gain."""


class Rebalancer:
    """Tracks the ranks' speeds and proposes a new plan when it gains 5% or more.

    A pure function of values that all ranks have exchanged, with the same bits on every machine, so
    every rank arrives at the same plan at the same step.

    A rank's cost model is scaled: alpha and beta cannot be separated at a single share. If the
    first steps of a new plan do not take as long as planned, alpha and beta are fitted to the times
    at its share and the previous one: with a wrong ratio of the two, samples would move back and
    forth forever.

    Noise must not move samples back and forth: the gain has to remain even if every estimate is
    off by 2.5 standard errors toward the values of the current plan. A plan based on the first
    steps after a change, or on the benchmark, may be refined once, after ten steps, for 2%.
    """

    def __init__(
        self,
        costs: Sequence[RankCost],
        batch_sizes: Sequence[int],
        min_batch: int = 1,
    ) -> None:
        """Start from a plan and the ranks' benchmarked costs."""
        self.batch_sizes = list(batch_sizes)
        self._min_batch = min_batch
        self._largest = list(batch_sizes)
        self._costs = CostTable.from_costs(costs)
        self._monitors = SpeedMonitors(len(costs))
        self._planned_logs = np.zeros(len(costs))
        # The shares of the previous plan, and their seconds when it was replaced.
        self._previous: tuple[np.ndarray, np.ndarray] | None = None
        self._waits: deque[float] = deque(maxlen=_WAIT_WINDOW)
        self._steps = 0
        self._refined = False

    @property
    def factors(self) -> list[float]:
        """Each rank's compute time relative to its cost model."""
        return portable_math.exp(self._monitors.log_factors).tolist()

    @property
    def costs(self) -> list[RankCost]:
        """Each rank's estimated cost of a step."""
        return self._scaled(self._monitors.log_factors).costs()

    def observe(self, steps: RankSteps, max_growth: float = math.inf) -> NewPlan | None:
        """Add a step's times of all ranks; return a new plan if it is worth the change, else None.

        A share that is computed at once may not fit in memory: a rank's next one is at most
        `max_growth` times its largest so far, and at most its largest micro-batch. With
        micro-batches any share fits, and `max_growth` is infinite.

        A step with other shares than the plan's is ignored: the last, partial step of an epoch, or
        one whose batches were fetched before the plan. The returned plan becomes the current one.
        """
        if not (steps.samples == self.batch_sizes).all():
            return None
        timed = (steps.steps > 0) & (steps.samples > 0)
        planned_sec = np.where(timed, self._costs.seconds(steps.samples), 1.0)
        self._monitors.observe(np.maximum(steps.work_sec, 1e-9) / planned_sec, timed)
        self._waits.append(float(steps.wait_sec.min()))
        self._steps += 1
        if self._steps == _STEPS_BETWEEN and self._previous is not None:
            self._separate(*self._previous)
        plan = self._better_plan(max_growth) if self._steps >= _STEPS_BETWEEN else None
        if plan is not None:
            shares = np.array(self.batch_sizes)
            seconds = self._scaled(self._monitors.log_factors).seconds(shares)
            self._previous = (shares, seconds)
            self._refined = plan.gain < _MIN_GAIN
            self.batch_sizes = plan.batch_sizes
            self._largest = list(map(max, self._largest, plan.batch_sizes))
            self._planned_logs = self._monitors.log_factors
            self._steps = 0
            self._monitors.restart()
        return plan

    def _separate(self, shares: np.ndarray, seconds: np.ndarray) -> None:
        """Fit alpha and beta to the times at two shares, for ranks that take longer than planned.

        The predicted time at the current share does not change, so neither does the factor.
        """
        current = np.array(self.batch_sizes)
        costs = self._costs
        logs = self._monitors.log_factors
        current_sec = costs.seconds(current)
        previous_sec = seconds / portable_math.exp(logs)
        smaller = np.minimum(current, shares)
        larger = np.maximum(current, shares)
        errors = np.maximum(_STANDARD_ERRORS * self._monitors.log_errors, _MIN_CHANGE)
        is_wrong = np.abs(logs - self._planned_logs) > errors
        in_one_micro_batch = (smaller > 0) & (larger <= costs.largest_micro_batch)
        fitted = is_wrong & in_one_micro_batch & (larger >= _APART * smaller)
        # The limits of `fit`: alpha is not negative, and not more than most of the time.
        most = current_sec / np.maximum(current, 1)
        larger_sec = np.where(current < shares, previous_sec, current_sec)
        least = MIN_SLOPE * larger_sec / np.maximum(larger, 1)
        slope = (current_sec - previous_sec) / np.where(fitted, current - shares, 1)
        beta = np.where(fitted, np.clip(slope, np.minimum(least, most), most), costs.beta_sec)
        # For a line through the origin, rounding may make this slightly negative.
        alpha = np.where(fitted, np.maximum(current_sec - beta * current, 0.0), costs.alpha_sec)
        self._costs = replace(costs, alpha_sec=alpha, beta_sec=beta)

    def _better_plan(self, max_growth: float) -> NewPlan | None:
        may_refine = not self._refined and self._steps >= _STEPS_TO_REFINE
        least = _MIN_GAIN_OF_REFINING if may_refine else _MIN_GAIN
        changes = self._monitors.log_factors - self._planned_logs
        # Each estimate is moved by some standard errors toward the planned value.
        certain = np.maximum(0.0, np.abs(changes) - _STANDARD_ERRORS * self._monitors.log_errors)
        cautious = self._scaled(self._planned_logs + np.copysign(certain, changes))
        if not self._can_gain(cautious, least):
            return None
        costs = self._scaled(self._monitors.log_factors)
        total = sum(self.batch_sizes)
        most = None if math.isinf(max_growth) else self._growth_limits(max_growth)
        batch_sizes = plan_fastest(costs.costs(), total, self._min_batch, most)
        gain = self._gain(batch_sizes, costs)
        if min(gain, self._gain(batch_sizes, cautious)) < least:
            return None
        rank = int(np.abs(changes).argmax())
        ratio = portable_math.exp(changes)[rank]
        reason = f"takes {ratio:.2f}x as long as planned; {gain:.0%} faster steps predicted"
        return NewPlan(batch_sizes, gain, self.factors, rank, reason)

    def _can_gain(self, costs: CostTable, least: float) -> bool:
        """Return whether any plan could gain this much; far cheaper than finding the best plan."""
        longest = self._step_sec(costs, self.batch_sizes) / (1 + least) - median(self._waits)
        # Rounding must not make the answer False.
        total = sum(self.batch_sizes)
        return bool(costs.within(max(0.0, longest) * (1 + 1e-9), total).sum() >= total)

    def _growth_limits(self, max_growth: float) -> list[int]:
        memory_limits = self._costs.largest_micro_batch.tolist()
        return [  # earlier batches did fit, whatever the memory limit
            max(largest, int(min(max_growth * largest, limit)))
            for largest, limit in zip(self._largest, memory_limits, strict=True)
        ]

    def _scaled(self, logs: np.ndarray) -> CostTable:
        return self._costs.times(portable_math.exp(logs))

    def _gain(self, batch_sizes: Sequence[int], costs: CostTable) -> float:
        return self._step_sec(costs, self.batch_sizes) / self._step_sec(costs, batch_sizes) - 1

    def _step_sec(self, costs: CostTable, batch_sizes: Sequence[int]) -> float:
        """Return the slowest rank's seconds plus communication: the shortest wait of any rank."""
        return float(costs.seconds(np.array(batch_sizes)).max()) + median(self._waits)


class SpeedMonitors:
    """Tracks the compute time of each rank relative to its cost model.

    The estimate is the median of the steps since the last change, at most 30, so that old steps
    are dropped and single slow steps do not matter. Three consecutive steps that deviate in the
    same direction, by more than 10% and by more than three times the usual noise, are a change:
    all earlier steps are dropped. Everything is in logarithms, because slowdowns are factors.

    Every array has one entry per rank.
    """

    def __init__(self, ranks: int) -> None:
        self.log_factors = np.zeros(ranks)
        """The logarithms of the estimates; 0 before any step."""
        self._logs = _History(ranks)
        self._differences = _History(ranks)

    @property
    def steps(self) -> np.ndarray:
        """The number of steps that each estimate is based on."""
        return self._logs.counts

    @property
    def log_errors(self) -> np.ndarray:
        """The standard errors of `log_factors`; infinite before any step."""
        errors = _MEDIAN_ERROR * self._noise() / np.sqrt(np.maximum(self.steps, 1))
        return np.where(self.steps > 0, errors, np.inf)

    def observe(self, ratios: np.ndarray, timed: np.ndarray) -> None:
        """Add the ratio of measured to predicted time of each rank in the mask `timed`."""
        values = portable_math.log(ratios)
        differences = np.abs(values - self._logs.newest(1)[:, 0])
        self._differences.append(differences, timed & (self.steps > 0))
        self._logs.append(values, timed)
        changed = self._have_changed() & timed
        if changed.any():
            self._logs.keep_newest(_NEWEST, changed)
        self.log_factors = np.where(timed, self._logs.medians(), self.log_factors)

    def restart(self) -> None:
        """Drop the steps but keep the estimates, because the ranks' batch sizes change."""
        self._logs = _History(len(self.log_factors))

    def _noise(self) -> np.ndarray:
        """Return the standard deviation of each rank's steps, robust to changes of speed."""
        has_noise = self._differences.counts >= _NEWEST
        noise = self._differences.medians() / MEDIAN_DIFFERENCE
        return np.where(has_noise, noise, _INITIAL_NOISE)

    def _have_changed(self) -> np.ndarray:
        deviations = self._logs.newest(_NEWEST) - self._logs.medians(_NEWEST)[:, None]
        # The least deviation of the newest steps, if they all deviate in the same direction.
        shift = np.maximum(deviations.min(1), -deviations.max(1))
        far: np.ndarray = (shift > _MIN_CHANGE) & (self.steps >= 2 * _NEWEST)
        return far & (shift > 3 * self._noise()) if far.any() else far  # usually none has changed


class _History:
    """The newest values of each rank, at most 30."""

    def __init__(self, ranks: int) -> None:
        self.counts = np.zeros(ranks, int)
        self._ranks = np.arange(ranks)
        self._values = np.full((ranks, _WINDOW), _NO_VALUE)  # the newest one in the last column

    def append(self, values: np.ndarray, ranks: np.ndarray) -> None:
        """Add a value for each rank in the mask `ranks`."""
        rows = slice(None) if ranks.all() else np.flatnonzero(ranks)  # a slice copies nothing
        self._values[rows, :-1] = self._values[rows, 1:]
        self._values[rows, -1] = values[rows]
        self.counts[rows] = np.minimum(self.counts[rows] + 1, _WINDOW)

    def newest(self, count: int) -> np.ndarray:
        """Return the newest values, [ranks, count]; very large if there are fewer."""
        return self._values[:, -count:]

    def keep_newest(self, count: int, ranks: np.ndarray) -> None:
        """Drop all but the newest values of the ranks in the mask `ranks`."""
        self._values[ranks, :-count] = _NO_VALUE
        self.counts[ranks] = count

    def medians(self, without_newest: int = 0) -> np.ndarray:
        """Return each rank's median; meaningless for a rank without values."""
        ordered = np.sort(self._values[:, : _WINDOW - without_newest])
        last = np.maximum(self.counts - without_newest, 1) - 1
        return (ordered[self._ranks, last // 2] + ordered[self._ranks, (last + 1) // 2]) / 2
