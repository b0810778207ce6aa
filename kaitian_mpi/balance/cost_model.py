"""The cost model of a rank: the time of its share of a step, fitted to measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

MAX_CHANGE = 0.03  # of a predicted step, by more measurements
_MIN_SLOPE = 0.25  # relative to the largest batch's time per sample


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
        if samples == 0:
            return 0
        limit = self.largest_micro_batch
        return 1 if limit is None else math.ceil(samples / limit)

    def seconds(self, samples: int) -> float:
        """Return the seconds of a step with this share; 0 without samples."""
        return self.alpha_sec * self.micro_batches(samples) + self.beta_sec * samples

    def times(self, factor: float) -> RankCost:
        """Return the cost of a rank that takes `factor` times as long."""
        return RankCost(self.alpha_sec * factor, self.beta_sec * factor, self.largest_micro_batch)

    def to_json(self) -> dict[str, Any]:
        """Convert to values that JSON can hold."""
        model = {"alpha_sec": self.alpha_sec, "beta_sec": self.beta_sec}
        return {"model": model, "largest_micro_batch": self.largest_micro_batch}

    @staticmethod
    def from_json(content: dict[str, Any]) -> RankCost:
        """Convert back from the result of `to_json`."""
        return RankCost(**content["model"], largest_micro_batch=content["largest_micro_batch"])


def fit(
    batches: Sequence[int], seconds: Sequence[float], weights: Sequence[float] | None = None
) -> RankCost:
    """Fit a rising line with a non-negative intercept to measured (batch, seconds).

    Weighted least squares that assumes a measurement's variance to be proportional to its time, as
    for a sum of many small disturbances. Noise can tilt the line too far, and far beyond the
    largest measured batch a rank would then look many times faster or slower than it is. So if the
    intercept is negative, the best line through the origin is used; and if more than three quarters
    of the largest batch's time would be independent of the batch, the best line with exactly that.
    A single batch size gives the line through the origin.

    Args:
        batches: samples, at least 1 each, or 0 if there are others too.
        seconds: above 0, one for each batch.
        weights: one for each batch, inversely proportional to the variance; None for the above.
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
        beta = max(beta, _MIN_SLOPE * max(zip(batches, seconds, strict=True))[1] / max(batches))
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

    The cost model is fitted to the medians of the rounds. One more round, however fast or slow it
    is, moves a median no further than halfway to the next measurement; the rank's predicted time is
    settled if it would then change by at most 3%. A step lasts as long as its slowest rank, so
    none of its ranks can change it by more.
    """
    if any(len(times) < 2 for times in rounds.values()):
        return False
    batches = list(rounds)

    def predicted(*extreme: float) -> float:
        medians = [median([*times, *extreme]) for times in rounds.values()]
        return fit(batches, medians).seconds(share)

    now, longest = predicted(), max(max(times) for times in rounds.values())
    return all(abs(predicted(extreme) / now - 1) <= MAX_CHANGE for extreme in (0.0, longest))
