"""The cost model of a rank: the time of a step as a function of its batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MIN_SLOPE = 0.25  # relative to the largest batch's time per sample


@dataclass(frozen=True)
class CostModel:
    """A step of b samples takes `alpha_sec + beta_sec * b` seconds."""

    alpha_sec: float
    """Seconds per step, independent of the batch size."""
    beta_sec: float
    """Seconds per sample."""

    def seconds(self, batch: int) -> float:
        """Return the seconds of a step with this many samples."""
        return self.alpha_sec + self.beta_sec * batch

    def times(self, factor: float) -> CostModel:
        """Return the model of a rank that takes `factor` times as long."""
        return CostModel(self.alpha_sec * factor, self.beta_sec * factor)


def fit(batches: Sequence[int], seconds: Sequence[float]) -> CostModel:
    """Fit a rising line with a non-negative intercept to measured (batch, seconds).

    Weighted least squares that assumes a measurement's variance to be proportional to its time, as
    for a sum of many small disturbances. Noise can tilt the line too far, and far beyond the
    largest measured batch a rank would then look many times faster or slower than it is. So if the
    intercept is negative, the best line through the origin is used; and if more than three quarters
    of the largest batch's time would be independent of the batch, the best line with exactly that.

    Args:
        batches: samples, at least 1 each.
        seconds: above 0, one for each batch.
    """
    weights = [1.0 / s for s in seconds]
    total = sum(weights)
    mean_batch = sum(w * b for w, b in zip(weights, batches, strict=True)) / total
    mean_sec = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    measured = list(zip(weights, batches, seconds, strict=True))
    spread = sum(w * (b - mean_batch) ** 2 for w, b, _ in measured)
    if spread > 0:
        beta = sum(w * (b - mean_batch) * (s - mean_sec) for w, b, s in measured) / spread
        alpha = mean_sec - beta * mean_batch
        min_slope = _MIN_SLOPE * max(zip(batches, seconds, strict=True))[1] / max(batches)
        if beta < min_slope:
            beta = min_slope
            alpha = mean_sec - beta * mean_batch
        if alpha >= 0:
            return CostModel(alpha, beta)
    slope = sum(w * b * s for w, b, s in measured) / sum(w * b * b for w, b, _ in measured)
    return CostModel(0.0, slope)


def fit_error(model: CostModel, batches: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the root mean square of a model's relative errors, 0.02 for 2%."""
    errors = [model.seconds(b) / s - 1 for b, s in zip(batches, seconds, strict=True)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def scores(seconds: Sequence[float]) -> list[float]:
    """Return score_i = time_min / time_i, in (0, 1] (KAITIAN, arXiv 2505.10183)."""
    fastest = min(seconds)
    return [fastest / time for time in seconds]
