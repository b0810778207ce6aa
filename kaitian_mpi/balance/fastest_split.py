"""Finds the fastest split of a global batch over heterogeneous ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.cost_model import RankCost

_NO_LIMIT = 2.0**62


@dataclass(frozen=True)
class CostTable:
    """The costs of many ranks, as arrays with one entry per rank."""

    alpha_sec: np.ndarray
    beta_sec: np.ndarray
    largest_micro_batch: np.ndarray
    """A very large number if there is no limit."""

    @classmethod
    def of(cls, costs: Sequence[RankCost]) -> CostTable:
        """Return the table of these costs."""
        limits = [cost.largest_micro_batch for cost in costs]
        return cls(
            np.array([cost.alpha_sec for cost in costs]),
            np.array([cost.beta_sec for cost in costs]),
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

    def within(self, seconds: float, most: int | np.ndarray) -> np.ndarray:
        """Return how many samples, at most `most`, each rank can process in this time."""
        full_sec = self.alpha_sec + self.beta_sec * self.largest_micro_batch
        full_count = np.minimum(np.floor(seconds / full_sec), most)  # of at least a sample each
        left_sec = seconds - full_count * full_sec
        partial = np.floor((left_sec - self.alpha_sec) / self.beta_sec)
        partial = np.clip(partial, 0, self.largest_micro_batch)
        return np.minimum(full_count * self.largest_micro_batch + partial, most).astype(np.int64)

    def costs(self) -> list[RankCost]:
        """Return the cost of each rank."""
        columns = (self.alpha_sec, self.beta_sec, self.largest_micro_batch)
        return [
            RankCost(alpha, beta, None if limit == _NO_LIMIT else int(limit))
            for alpha, beta, limit in zip(*(c.tolist() for c in columns), strict=True)
        ]


def fastest_split(
    costs: Sequence[RankCost],
    global_batch_size: int,
    least: int = 0,
    most: Sequence[int] | None = None,
) -> list[int]:
    """Return the shares with the shortest step, i.e. those whose slowest rank finishes first.

    Minimizes max_i (alpha_i * k_i + beta_i * b_i) over integers b_i that sum to the global batch,
    with k_i = ceil(b_i / limit_i). If `least` is 0, a rank whose smallest share would slow down the
    step gets none. The same input gives the same shares on every machine.

    Args:
        costs: of each rank; every sample takes some time.
        global_batch_size: samples per step.
        least: the fewest samples of each rank; all ranks together must not exceed the global batch.
        most: the most samples of each rank, at least `least`; None for no limit.

    Returns:
        Samples per step, per rank.
    """
    table = CostTable.of(costs)
    ones, limits = np.ones(len(costs), int), None if most is None else np.array(most)
    samples, fewer = split_cohorts(table, ones, global_batch_size, least, limits)
    shares: list[int] = (samples - fewer).tolist()
    return shares


def split_cohorts(
    costs: CostTable,
    ranks: np.ndarray,
    total: int,
    least: int = 0,
    most: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the fastest split over cohorts, each of several ranks with the same cost.

    The step time is found by bisection: in a given time each rank can process some number of
    samples, and the shortest time in which they add up to the global batch is the optimum. The
    surplus over the global batch is then removed from the ranks that finish last.

    Args:
        costs: of each cohort's ranks.
        ranks: the number of ranks in each cohort.
        total: samples per step over all ranks.
        least: as in `fastest_split`, as is `most`.
        most: by cohort.

    Returns:
        Samples of each of the cohort's ranks, and how many of these get one sample fewer.
    """
    alpha, beta = costs.alpha_sec, costs.beta_sec
    known = (alpha >= 0) & (beta > 0) & np.isfinite(alpha + beta)  # False for NaN
    if not (known & (costs.largest_micro_batch >= 1)).all():
        raise ValueError("each cost must be finite, with beta_sec above 0 and a limit of 1 or more")
    limit = np.full(len(ranks), total) if most is None else np.minimum(most, total)
    if not least * ranks.sum() <= total <= (limit * ranks).sum():
        raise ValueError(f"the ranks cannot have {total} samples in all")

    def within(seconds: float) -> np.ndarray:
        return np.maximum(costs.within(seconds, limit), least)

    def reach(seconds: float) -> bool:
        return bool((within(seconds) * ranks).sum() >= total)

    if least * ranks.sum() == total:
        return np.full(len(ranks), least), np.zeros(len(ranks), int)
    low, high = 0.0, float((alpha + beta).min())
    while not reach(high):
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:  # until they are adjacent numbers
        low, high = (low, middle) if reach(middle) else (middle, high)
    return _without_surplus(costs, ranks, within(high), total, least)


def _without_surplus(
    costs: CostTable, ranks: np.ndarray, samples: np.ndarray, total: int, least: int
) -> tuple[np.ndarray, np.ndarray]:
    surplus = int((samples * ranks).sum()) - total
    reducible = np.where(samples > least, ranks, 0)
    while surplus >= reducible.sum() > 0:
        samples, surplus = samples - (reducible > 0), surplus - int(reducible.sum())
        reducible = np.where(samples > least, ranks, 0)
    # The last to finish first; of several, the last of them.
    order = np.lexsort((-np.arange(len(ranks)), -costs.seconds(samples)))
    before = np.cumsum(reducible[order]) - reducible[order]
    fewer = np.zeros(len(ranks), int)
    fewer[order] = np.clip(surplus - before, 0, reducible[order])
    return samples, fewer
