"""Learns the cost of each rank's step from the first training steps, without a benchmark."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from kaitian_mpi.balance.cost_model import RankCost, fit
from kaitian_mpi.balance.fastest_split import plan_fastest
from kaitian_mpi.balance.rebalancer import MAX_GROWTH, MEDIAN_DIFFERENCE, RankSteps

_STEPS_PER_TRIAL = 4
_MIN_STEPS = 3  # of one batch size, so that a single slow step does not affect the middle half
_WINDOW = 30
_PATIENCE = 20
# The first split is varied: a line through two close batch sizes mostly shows noise.
_MIN_CHANGE = 1.25
_SPREAD = 1.3
_MIN_GAIN = 0.02
# Learning ends when the standard error of every rank's time is small, or after many steps.
_MAX_ERROR = 0.015
_MAX_STEPS = 20
# Assumed before any measurement: alpha relative to a step's time, and its standard error.
_USUAL_ALPHA = 0.1
_ALPHA_ERROR = 0.2
_USUAL_NOISE = 0.1
_MIN_NOISE = 0.02
_MIN_DIFFERENCES = 3


class CostLearner:
    """Learns the ranks' cost models from their first steps, while it moves to the fastest split.

    A pure function of values that all ranks have exchanged, with the same bits on every machine, so
    every rank arrives at the same batch sizes, of the same sum, at the same step.

    - The first split is the caller's. At a single batch size, nine tenths of a rank's time are
      assumed to be proportional to it.
    - The second is the fastest by that, except that ranks whose batch size would hardly change
      are made to differ by about 30%: alpha and beta cannot be told apart otherwise.
    - Then it is the fastest by all steps so far. It changes again where that gains 2% or more,
      until all ranks' times are known to 1.5%, or for 20 steps. Then the costs are known.

    Each split is kept for four timed steps of every rank. For each batch size, the middle half
    of the times counts, without the first step, which compiles. The noisier they are, the closer
    the fitted slope stays to the assumed one. Devices may report several steps at once, and late.
    """

    def __init__(self, batch_sizes: Sequence[int], min_batch: int = 1, ahead: int = 0) -> None:
        """Start from a split, usually an equal one; a new split applies `ahead` steps later."""
        self.batch_sizes = list(batch_sizes)
        self.steps = 0
        self.costs: list[RankCost] | None = None
        """Each rank's cost; None until they are known, when learning ends."""
        self.gain = 0.0
        """Estimated gain in throughput by the latest change, without communication."""
        self._first = list(batch_sizes)
        self._is_first = True
        self._min_batch = min_batch
        self._patience = ahead + _PATIENCE
        self._ranks = [_RankTimes() for _ in batch_sizes]
        self._steps_of_trial = 0

    def observe(self, steps: RankSteps) -> list[int] | None:
        """Add all ranks' times of a step; return new batch sizes, or None to keep the current.

        When `costs` becomes known, `batch_sizes` are the fastest by these costs, to within 2%.
        """
        if self.costs is not None:
            return None
        counts = steps.steps.tolist()
        samples = steps.samples.tolist()
        work_sec = steps.work_sec.tolist()
        for rank, count, batch, seconds in zip(self._ranks, counts, samples, work_sec, strict=True):
            rank.add(count, batch, seconds)
        self.steps += 1
        self._steps_of_trial += 1
        return self._improve() if self._is_timed() else None

    @property
    def _is_overdue(self) -> bool:
        # No step may ever have these batch sizes, as when an epoch is shorter than a global batch.
        return self._steps_of_trial >= self._patience

    def _is_timed(self) -> bool:
        pairs = zip(self._ranks, self.batch_sizes, strict=True)
        counts = [len(rank.times.get(batch, ())) for rank, batch in pairs]
        enough = min(counts) >= _STEPS_PER_TRIAL or self._is_overdue
        return enough and all(rank.steps for rank in self._ranks)

    def _improve(self) -> list[int] | None:
        """Return the next split, if any; finish when it is the last."""
        costs = [rank.cost() for rank in self._ranks]
        is_first = self._is_first
        self._is_first = False
        batch_sizes = self._split(costs)
        if is_first:
            batch_sizes = self._split(self._spread(costs, batch_sizes))
        gain = _step_sec(costs, self.batch_sizes) / _step_sec(costs, batch_sizes) - 1
        changes = batch_sizes != self.batch_sizes and (is_first or gain >= _MIN_GAIN)
        fastest = plan_fastest(costs, sum(self._first), self._min_batch)
        is_certain = self._is_overdue or all(rank.is_certain for rank in self._ranks)
        if not is_first and is_certain and (not changes or batch_sizes == fastest):
            self.costs = costs
        if not changes:
            return None
        self.gain = gain
        self.batch_sizes = batch_sizes
        self._steps_of_trial = 0
        return batch_sizes

    def _split(self, costs: Sequence[RankCost]) -> list[int]:
        """Return the fastest split in which no batch grows too much."""
        most = [
            max(first, math.floor(MAX_GROWTH * rank.largest))
            for first, rank in zip(self._first, self._ranks, strict=True)
        ]
        return plan_fastest(costs, sum(self._first), self._min_batch, most)

    def _spread(self, costs: Sequence[RankCost], batch_sizes: Sequence[int]) -> list[RankCost]:
        """Return costs whose fastest split changes the batch size of every rank, if possible.

        Of the ranks whose batch size would hardly change, those that would grow most are treated as
        faster.
        """
        changes = [new / old for new, old in zip(batch_sizes, self.batch_sizes, strict=True)]
        close = [n for n, change in enumerate(changes) if 1 / _MIN_CHANGE < change < _MIN_CHANGE]
        close.sort(key=lambda rank: -changes[rank])
        assumed = list(costs)
        for index, rank in enumerate(close):
            assumed[rank] = costs[rank].times(1 / _SPREAD if index < len(close) // 2 else _SPREAD)
        return assumed


def _step_sec(costs: Sequence[RankCost], batch_sizes: Sequence[int]) -> float:
    return max(cost.seconds(b) for cost, b in zip(costs, batch_sizes, strict=True))


class _RankTimes:
    """One rank's step times."""

    def __init__(self) -> None:
        self.largest = 0
        """The largest batch so far."""
        self.times: dict[int, deque[float]] = {}
        self._untimed: deque[int] = deque()
        self._differences: deque[float] = deque(maxlen=_WINDOW)
        self._is_warm = False

    @property
    def steps(self) -> int:
        """The number of steps that have been timed."""
        return sum(len(times) for times in self.times.values())

    @property
    def is_certain(self) -> bool:
        """Whether the cost at the timed batch sizes is known well enough."""
        steps = self.steps
        return steps >= _MAX_STEPS or self._noise() <= _MAX_ERROR * math.sqrt(steps)

    def add(self, steps: int, samples: int, work_sec: float) -> None:
        """Add a step, and the mean time of the steps that the device has finished since."""
        self.largest = max(self.largest, samples)
        self._untimed.append(samples if self._is_warm else 0)
        self._is_warm = True
        timed = [self._untimed.popleft() for _ in range(min(steps, len(self._untimed)))]
        # The time is their average, so they must have the same batch size.
        if len(timed) < steps or len(set(timed)) != 1 or not timed[0]:
            return
        times = self.times.setdefault(timed[0], deque(maxlen=_WINDOW))
        seconds = max(work_sec, 1e-9)
        if times:
            self._differences.append(abs(seconds - times[-1]) / ((seconds + times[-1]) / 2))
        times.extend([seconds] * steps)

    def cost(self) -> RankCost:
        """Return the cost fitted to the times so far, at least one."""
        well_timed = {b: times for b, times in self.times.items() if len(times) >= _MIN_STEPS}
        step_times = well_timed or self.times
        seconds = [_mean_of_middle_half(times) for times in step_times.values()]
        errors = [self._noise() * sec for sec in seconds]
        counts = [len(times) for times in step_times.values()]
        # The assumption about alpha counts as if a step without samples had been measured.
        batch_sizes = [*step_times, 0]
        errors.append(_ALPHA_ERROR * seconds[0])
        counts.append(1)
        seconds.append(_USUAL_ALPHA * seconds[0])
        # Without powers, whose last bit may differ between machines.
        weights = [n / (error * error) for n, error in zip(counts, errors, strict=True)]
        return fit(batch_sizes, seconds, weights)

    def _noise(self) -> float:
        """Return the standard deviation of a step's time, relative to it."""
        if len(self._differences) < _MIN_DIFFERENCES:
            return _USUAL_NOISE
        return max(_MIN_NOISE, median(self._differences) / MEDIAN_DIFFERENCE)


def _mean_of_middle_half(times: Sequence[float]) -> float:
    cut = (len(times) + 1) // 4
    return fmean(sorted(times)[cut : len(times) - cut])
