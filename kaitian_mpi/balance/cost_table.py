"""The costs of many ranks at once, as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.fastest_split import RankCost, samples_within

_NO_LIMIT = 2.0**62


@dataclasses.dataclass(frozen=True)
class CostTable:
    """The ranks' `RankCost`s: arrays of alpha and beta in seconds, and of the limits in samples."""

    alpha_sec: np.ndarray
    beta_sec: np.ndarray
    largest_micro_batch: np.ndarray
    """A very large number if there is no limit."""

    @classmethod
    def of(cls, costs: Sequence[RankCost]) -> CostTable:
        """Return the table of these costs."""
        limits = [cost.largest_micro_batch for cost in costs]
        return cls(
            np.array([cost.model.alpha_sec for cost in costs]),
            np.array([cost.model.beta_sec for cost in costs]),
            np.array([_NO_LIMIT if limit is None else float(limit) for limit in limits]),
        )

    def times(self, factors: np.ndarray) -> CostTable:
        """Return the costs of ranks that take `factors` times as long, a factor per rank."""
        return CostTable(
            self.alpha_sec * factors, self.beta_sec * factors, self.largest_micro_batch
        )

    def seconds(self, samples: np.ndarray) -> np.ndarray:
        """Return the seconds that each rank's step takes with its samples; 0 without samples."""
        micro_batches = np.ceil(samples / self.largest_micro_batch)
        return self.alpha_sec * micro_batches + self.beta_sec * samples

    def can_process(self, samples: int, seconds: float) -> bool:
        """Return whether the ranks together can process so many samples in this time, 0 or more."""
        limit = np.minimum(self.largest_micro_batch, max(samples, 1))
        within = samples_within(seconds, self.alpha_sec, self.beta_sec, limit, samples)
        return bool(within.sum() >= samples)

    def costs(self) -> list[RankCost]:
        """Return the cost of each rank."""
        columns = (self.alpha_sec, self.beta_sec, self.largest_micro_batch)
        return [
            RankCost(CostModel(alpha, beta), None if limit == _NO_LIMIT else int(limit))
            for alpha, beta, limit in zip(*(c.tolist() for c in columns), strict=True)
        ]
