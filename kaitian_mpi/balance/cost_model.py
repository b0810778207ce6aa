"""How long a rank takes for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def fit(batches: Sequence[int], seconds: Sequence[float]) -> CostModel:
    """Fit a line through measured (batch, seconds) by least squares, with no negative part.

    A line that noise has tilted below zero at either end is replaced by the best one through the
    origin, or by the best constant.
    """
    count = len(batches)
    mean_batch, mean_sec = sum(batches) / count, sum(seconds) / count
    spread = sum((b - mean_batch) ** 2 for b in batches)
    if spread > 0:
        pairs = zip(batches, seconds, strict=True)
        beta = sum((b - mean_batch) * (s - mean_sec) for b, s in pairs) / spread
        alpha = mean_sec - beta * mean_batch
        if alpha >= 0 and beta >= 0:
            return CostModel(alpha, beta)
        if beta < 0:
            return CostModel(mean_sec, 0.0)
    pairs = zip(batches, seconds, strict=True)
    return CostModel(0.0, sum(b * s for b, s in pairs) / sum(b * b for b in batches))


def scores(seconds: Sequence[float]) -> list[float]:
    """Return score_i = time_min / time_i, in (0, 1] (KAITIAN, arXiv 2505.10183)."""
    fastest = min(seconds)
    return [fastest / time for time in seconds]
