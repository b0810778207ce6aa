"""Splits samples into the integer shares of the shortest step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kaitian_mpi.balance.cost_model import CostTable, RankCost
from kaitian_mpi.balance.shares import check_enough
from kaitian_mpi.errors import UserError


def plan_fastest(
    costs: Sequence[RankCost],
    global_batch_size: int,
    min_batch: int = 1,
    most: Sequence[int | None] | None = None,
) -> list[int]:
    """Divide the global batch for the shortest step, with at least `min_batch` for every rank.

    `most` are the ranks' largest shares, None for no limit.
    """
    check_enough(global_batch_size, len(costs), min_batch)
    limits = [
        global_batch_size if limit is None else limit for limit in most or [None] * len(costs)
    ]
    if sum(limits) < global_batch_size:
        raise UserError(
            f"--sync-bn computes a step without micro-batches, but only {sum(limits)} of "
            f"{global_batch_size} samples fit in the ranks' memory; lower --global-batch-size, or "
            "start more ranks"
        )
    return fastest_split(costs, global_batch_size, min_batch, limits)


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

    Each rank gets at least `least` samples, and at most its entry of `most`; None: no limit.
    """
    table = CostTable.from_costs(costs)
    ones = np.ones(len(costs), int)
    limits = None if most is None else np.array(most)
    samples, fewer = split_cohorts(table, ones, global_batch_size, least, limits)
    shares: list[int] = (samples - fewer).tolist()
    return shares


def split_cohorts(
    costs: CostTable, ranks: np.ndarray, total: int, least: int = 0, most: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the fastest split over cohorts, each of several ranks with the same cost.

    The step time is found by bisection: in a given time each rank can process some number of
    samples, and the shortest time in which they add up to the global batch is the optimum. The
    surplus over the global batch is then removed from the ranks that finish last.

    Returns:
        By cohort, the samples of each of its ranks, and how many of its ranks get one sample fewer.

    Raises:
        ValueError: a cost is not a positive number, or the limits do not permit `total` samples.
    """
    alpha = costs.alpha_sec
    beta = costs.beta_sec
    is_valid = (alpha >= 0) & (beta > 0) & np.isfinite(alpha + beta)  # False for NaN
    if not (is_valid & (costs.largest_micro_batch >= 1)).all():
        raise ValueError("each cost must be finite, with beta_sec above 0 and a limit of 1 or more")
    limit = np.full(len(ranks), total) if most is None else np.minimum(most, total)
    if not least * ranks.sum() <= total <= (limit * ranks).sum():
        raise ValueError(f"{total} samples do not fit the ranks' limits")

    def within(seconds: float) -> np.ndarray:
        return np.maximum(costs.within(seconds, limit), least)

    def reach(seconds: float) -> bool:
        return bool((within(seconds) * ranks).sum() >= total)

    if least * ranks.sum() == total:
        return np.full(len(ranks), least), np.zeros(len(ranks), int)
    low = 0.0
    high = float((alpha + beta).min())
    while not reach(high):
        low = high
        high = 2 * high
    while low < (middle := (low + high) / 2) < high:  # until they are adjacent numbers
        low, high = (low, middle) if reach(middle) else (middle, high)
    return _without_surplus(costs, ranks, within(high), total, least)


def _without_surplus(
    costs: CostTable, ranks: np.ndarray, samples: np.ndarray, total: int, least: int
) -> tuple[np.ndarray, np.ndarray]:
    surplus = int((samples * ranks).sum()) - total
    reducible = np.where(samples > least, ranks, 0)
    while surplus >= reducible.sum() > 0:
        samples = samples - (reducible > 0)
        surplus = surplus - int(reducible.sum())
        reducible = np.where(samples > least, ranks, 0)
    # Ranks that finish last come first; if several do, the one with the highest index.
    order = np.lexsort((-np.arange(len(ranks)), -costs.seconds(samples)))
    before = np.cumsum(reducible[order]) - reducible[order]
    fewer = np.zeros(len(ranks), int)
    fewer[order] = np.clip(surplus - before, 0, reducible[order])
    return samples, fewer
