"""Splits samples into integer shares: for the shortest step, equally, or into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kaitian_mpi.balance.cost_model import CostTable, RankCost
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
    _check_enough(global_batch_size, len(costs), min_batch)
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


def plan_equal(ranks: int, global_batch_size: int, min_batch: int = 1) -> list[int]:
    """Divide the global batch equally, to within one sample."""
    _check_enough(global_batch_size, ranks, min_batch)
    return apportion(global_batch_size, [1] * ranks)


def plan_by_paper(scores: Sequence[float], batch_size: int, min_batch: int = 1) -> list[int]:
    """Return batch_i = round(batch_size x score_i), at least `min_batch` (arXiv 2505.10183).

    The global batch size, their sum, grows with the number of devices.
    """
    return [max(min_batch, round(batch_size * score)) for score in scores]


def _check_enough(global_batch_size: int, ranks: int, min_batch: int) -> None:
    if global_batch_size >= min_batch * ranks:
        return
    least = "one sample" if min_batch == 1 else f"{min_batch} samples"
    why = "" if min_batch == 1 else f" because the model cannot train on fewer than {min_batch}"
    raise UserError(
        f"--global-batch-size {global_batch_size} is too small for {ranks} ranks, each of which "
        f"takes at least {least}{why}; give {min_batch * ranks} or more, or start fewer ranks"
    )


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


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` in proportion to `weights` by the method of largest remainders.

    Every share is its exact quota rounded down, or that plus one; leftover units go to the largest
    remainders, with ties to the lower index. The same input gives the same shares on every machine.
    """
    # The builtin sum rounds differently from Python 3.12 on, and ranks must agree.
    weight_sum = math.fsum(weights)
    quotas = [total * weight / weight_sum for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(
        (index for index, weight in enumerate(weights) if weight > 0),
        key=lambda index: shares[index] - quotas[index],
    )
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def merge_small(shares: Sequence[int], planned: Sequence[int], min_batch: int) -> list[int]:
    """Change as few shares as possible so that each is 0 or at least `min_batch`, if possible.

    The samples of the shares that are too small are collected and given back to some of the same
    ranks, in order of the planned share, `min_batch` samples each. The remainder goes to the rank
    that is furthest below its planned share.
    """
    if sum(shares) < min_batch:
        return list(shares)
    merged = list(shares)
    small = [rank for rank, share in enumerate(shares) if 0 < share < min_batch]
    left = sum(shares[rank] for rank in small)
    for rank in sorted(small, key=lambda rank: -planned[rank]):
        merged[rank] = min_batch if left >= min_batch else 0
        left -= merged[rank]
    if left:
        active = [rank for rank, share in enumerate(merged) if share]
        merged[max(active, key=lambda rank: planned[rank] - merged[rank])] += left
    return merged


def split_micro_batches(samples: int, most: int | None, min_batch: int = 1) -> list[int]:
    """Split a share into micro-batches of at most `most` samples, equal to within one sample.

    Each has at least `min_batch` samples if the share does, whatever `most` is. Without samples
    there is one empty micro-batch.
    """
    count = 1 if most is None else math.ceil(samples / most)
    return apportion(samples, [1] * max(1, min(count, samples // min_batch)))
