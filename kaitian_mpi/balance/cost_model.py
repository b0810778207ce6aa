"""The cost model of a rank: the time of its share of a step, fitted to measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

MAX_CHANGE = 0.03  # of the predicted step, if another round is measured
_NO_LIMIT = 2.0**62
MIN_SLOPE = 0.25  # relative to the largest batch's time per sample


@dataclass(frozen=True)
class RankCost:
    """The cost of a rank's share: b samples in k micro-batches take alpha*k + beta*b seconds."""

    alpha_sec: float
    """Seconds per micro-batch, independent of its size."""
    beta_sec: float
    """Seconds per sample."""
    largest_micro_batch: int | None = None
    """The most samples that fit in the rank's memory at once, at least 1; None: no limit."""

    def micro_batches(self, samples: int) -> int:
        """Return the number of micro-batches of a share."""
        return math.ceil(samples / (self.largest_micro_batch or max(samples, 1)))

    def seconds(self, samples: int) -> float:
        """Return the seconds of a step with this share; 0 without samples."""
        return self.alpha_sec * self.micro_batches(samples) + self.beta_sec * samples

    def times(self, factor: float) -> RankCost:
        """Return the cost of a rank that takes `factor` times as long."""
        return RankCost(self.alpha_sec * factor, self.beta_sec * factor, self.largest_micro_batch)


@dataclass(frozen=True)
class CostTable:
    """The costs of many ranks, as arrays with one entry per rank."""

    alpha_sec: np.ndarray
    beta_sec: np.ndarray
    largest_micro_batch: np.ndarray
    """A very large number if there is no limit."""

    @classmethod
    def from_costs(cls, costs: Sequence[RankCost]) -> CostTable:
        """Return a table with a row for each cost."""
        limits = [cost.largest_micro_batch for cost in costs]
        return cls(
            np.array([cost.alpha_sec for cost in costs]),
            np.array([cost.beta_sec for cost in costs]),
            np.array([_NO_LIMIT if limit is None else float(limit) for limit in limits]),
        )

    def times(self, factors: np.ndarray) -> CostTable:
        """Return the costs of ranks that take `factors` times as long, a factor per rank."""
        alpha_sec, beta_sec = self.alpha_sec * factors, self.beta_sec * factors
        return CostTable(alpha_sec, beta_sec, self.largest_micro_batch)

    def seconds(self, samples: np.ndarray) -> np.ndarray:
        """Return the seconds that each rank's step takes with its samples; 0 without samples."""
        micro_batches = np.ceil(samples / self.largest_micro_batch)
        return self.alpha_sec * micro_batches + self.beta_sec * samples

    def within(self, seconds: float, most: int | np.ndarray) -> np.ndarray:
        """Return the number of samples, at most `most`, that each rank can process in this time."""
        full_sec = self.alpha_sec + self.beta_sec * self.largest_micro_batch
        full_count = np.minimum(np.floor(seconds / full_sec), most)  # at least one sample each
        left_sec = seconds - full_count * full_sec
        partial = np.floor((left_sec - self.alpha_sec) / self.beta_sec)
        partial = np.clip(partial, 0, self.largest_micro_batch)
        return np.minimum(full_count * self.largest_micro_batch + partial, most).astype(np.int64)

    def costs(self) -> list[RankCost]:
        """Return the cost of each rank."""
        columns = (self.alpha_sec, self.beta_sec, self.largest_micro_batch)
        return [
            RankCost(alpha, beta, None if limit == _NO_LIMIT else int(limit))
            for alpha, beta, limit in zip(*(column.tolist() for column in columns), strict=True)
        ]


def fit(
    batches: Sequence[int], seconds: Sequence[float], weights: Sequence[float] | None = None
) -> RankCost:
    """Fit a rising line with a non-negative intercept to measured (batch, seconds).

    Uses weighted least squares; by default a measurement's variance is assumed to be proportional
    to its time, as for a sum of many small disturbances. Noise can tilt the line, and far beyond
    the largest measured batch a rank would then look many times faster or slower than it is. So if
    the intercept is negative, or there is one batch size, the best line through the origin is used;
    and if more than three quarters of the largest batch's time would be independent of the batch,
    the best line with exactly three quarters.
    """
    weights = weights or [1.0 / s for s in seconds]
    # The builtin sum rounds differently from Python 3.12 on, and ranks must agree.
    total = math.fsum(weights)
    mean_batch = math.fsum(w * b for w, b in zip(weights, batches, strict=True)) / total
    mean_sec = math.fsum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    measured = list(zip(weights, batches, seconds, strict=True))
    if max(batches) > min(batches):
        spread = math.fsum(w * (b - mean_batch) * (b - mean_batch) for w, b, _ in measured)
        beta = math.fsum(w * (b - mean_batch) * (s - mean_sec) for w, b, s in measured) / spread
        beta = max(beta, MIN_SLOPE * max(zip(batches, seconds, strict=True))[1] / max(batches))
        alpha = mean_sec - beta * mean_batch
        if alpha >= 0:
            return RankCost(alpha, beta)
    slope = math.fsum(w * b * s for w, b, s in measured) / math.fsum(
        w * b * b for w, b, _ in measured
    )
    return RankCost(0.0, slope)


def fit_error(cost: RankCost, batches: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the root mean square of a cost's relative errors, 0.02 for 2%."""
    errors = [cost.seconds(b) / s - 1 for b, s in zip(batches, seconds, strict=True)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def scores(seconds: Sequence[float]) -> list[float]:
    """Return score_i = time_min / time_i, in (0, 1] (KAITIAN, arXiv 2505.10183)."""
    fastest = min(seconds)
    return [fastest / time for time in seconds]


def is_settled(rounds: Mapping[int, Sequence[float]], share: int) -> bool:
    """Return whether another round of measurements would hardly change the predicted step.

    The cost model is fitted to the medians of the rounds. It is settled if one more round, however
    fast or slow, would change the rank's predicted time, and so the step's, by at most 3%.
    """
    if any(len(times) < 2 for times in rounds.values()):
        return False
    batches = list(rounds)

    def predicted(*extreme: float) -> float:
        medians = [median([*times, *extreme]) for times in rounds.values()]
        return fit(batches, medians).seconds(share)

    now = predicted()
    longest = max(max(times) for times in rounds.values())
    return all(abs(predicted(extreme) / now - 1) <= MAX_CHANGE for extreme in (0.0, longest))
