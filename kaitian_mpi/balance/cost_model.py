"""How long a rank takes for a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_SLOPE = 0.25  # of the largest batch's time per sample


@dataclass(frozen=True)
class CostModel:
    """A step of b samples takes `alpha_sec + beta_sec * b` seconds."""

    alpha_sec: float
    """Seconds per step, whatever the batch."""
    beta_sec: float
    """Seconds per sample."""

    def seconds(self, batch: int) -> float:
        """Return the seconds of a step with this many samples."""
        return self.alpha_sec + self.beta_sec * batch

    def times(self, factor: float) -> CostModel:
        """Return the model of a rank that takes `factor` times as long for everything."""
        return CostModel(self.alpha_sec * factor, self.beta_sec * factor)


def fit(batches: Sequence[int], seconds: Sequence[float]) -> CostModel:
    """Fit a line through measured (batch, seconds) that starts at 0 or above and rises.

    Least squares in which a measurement's variance is taken to grow with its seconds, as that of a
    sum of many small disturbances does. Noise can tilt the line too far, and far beyond the largest
    batch measured that would make a rank look many times faster or slower than it is. So where it
    starts below 0, the best line through the origin is taken; and where more than three quarters of
    the largest batch's time would not depend on the batch, the best line that takes just so much.

    Args:
        batches: samples, at least 1 each.
        seconds: above 0, one for each batch.
    """
    weights = [1.0 / s for s in seconds]
    whole = sum(weights)
    mean_batch = sum(w * b for w, b in zip(weights, batches, strict=True)) / whole
    mean_sec = sum(w * s for w, s in zip(weights, seconds, strict=True)) / whole
    measured = list(zip(weights, batches, seconds, strict=True))
    spread = sum(w * (b - mean_batch) ** 2 for w, b, _ in measured)
    if spread > 0:
        beta = sum(w * (b - mean_batch) * (s - mean_sec) for w, b, s in measured) / spread
        alpha = mean_sec - beta * mean_batch
        slope_at_least = _LEAST_SLOPE * max(zip(batches, seconds, strict=True))[1] / max(batches)
        if beta < slope_at_least:
            beta = slope_at_least
            alpha = mean_sec - beta * mean_batch
        if alpha >= 0:
            return CostModel(alpha, beta)
    slope = sum(w * b * s for w, b, s in measured) / sum(w * b * b for w, b, _ in measured)
    return CostModel(0.0, slope)


def fit_error(model: CostModel, batches: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the root mean square of the relative errors of a model, 0.02 for 2%."""
    errors = [model.seconds(b) / s - 1 for b, s in zip(batches, seconds, strict=True)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def scores(seconds: Sequence[float]) -> list[float]:
    """Return score_i = time_min / time_i, in (0, 1] (KAITIAN, arXiv 2505.10183)."""
    fastest = min(seconds)
    return [fastest / time for time in seconds]
