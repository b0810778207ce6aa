"""Splits a number of samples into integer shares."""

from __future__ import annotations

import math
from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` in proportion to `weights` by the method of largest remainders.

    Every share is its exact quota rounded down, or that plus one; leftover units go to the largest
    remainders, with ties to the lower index. The same input gives the same shares on every machine.

    Args:
        total: the number to split, at least 0.
        weights: finite, at least 0; a weight of 0 gets nothing.

    Returns:
        One share per weight; they sum to `total`.

    Raises:
        ValueError: `total` or a weight is out of range, or there is no weight above 0.
    """
    if total < 0:
        raise ValueError(f"total must be at least 0, not {total}")
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise ValueError(f"weights must be finite and at least 0, not {weight}")
    # The builtin sum rounds differently from Python 3.12 on, and ranks must agree.
    weight_sum = math.fsum(weights)
    if weight_sum == 0:
        raise ValueError(f"weights must have one above 0, not {list(weights)}")
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
    """Change as few shares as possible so that each is 0 or at least `min_batch`.

    If all together are smaller than that, they are unchanged.

    The samples of the shares that are too small are collected and given back to some of the same
    ranks, in order of the planned share, `min_batch` samples each. The remainder goes to the rank
    that is furthest below its planned share.

    Args:
        shares: of each rank.
        planned: each rank's usual share, 0 or at least `min_batch`.
        min_batch: the smallest share, at least 1.
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
    """Split a share into micro-batches of at most `most` samples, equal to within one.

    Args:
        samples: the share; 0 gives one empty micro-batch.
        most: at least 1; None for no limit.
        min_batch: the smallest micro-batch, if the share is that large; it takes precedence over
            `most`.
    """
    count = 1 if most is None else math.ceil(samples / most)
    return apportion(samples, [1] * max(1, min(count, samples // min_batch)))
