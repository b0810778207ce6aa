"""Whole shares of a whole number."""

from __future__ import annotations

import math
from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` in proportion to `weights` by the method of largest remainders.

    Every share is its exact quota rounded down, or that plus one; the ones left over go to the
    largest remainders, of equal ones to the lower index. The same input gives the same shares on
    every machine.

    Args:
        total: what to split, at least 0.
        weights: finite, at least 0; a weight of 0 gets nothing.

    Returns:
        One share per weight; they sum to `total`.

    Raises:
        ValueError: `total` or a weight is out of range, or there is no weight above 0.
    """
    if total < 0:
        raise ValueError(f"total: found {total}, needed at least 0")
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise ValueError(f"weights: found {weight}, needed finite numbers of at least 0")
    # The builtin sum rounds differently from Python 3.12 on, and ranks must agree.
    whole = math.fsum(weights)
    if whole == 0:
        raise ValueError(f"weights: found {list(weights)}, needed at least one above 0")
    quotas = [total * weight / whole for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(
        (index for index, weight in enumerate(weights) if weight > 0),
        key=lambda index: shares[index] - quotas[index],
    )
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def merge_small(shares: Sequence[int], planned: Sequence[int], min_batch: int) -> list[int]:
    """Change shares as little as it takes for each to be 0 or at least `min_batch`.

    Where all together are smaller, they stay as they are.

    What is in shares that are too small goes to some of these ranks, the first with the largest
    planned share, as a smallest share each; what is still left over goes to the rank with the most
    room below its planned share.

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
        able = [rank for rank, share in enumerate(merged) if share]
        merged[max(able, key=lambda rank: planned[rank] - merged[rank])] += left
    return merged


def cut(samples: int, most: int | None, min_batch: int = 1) -> list[int]:
    """Cut a share into micro-batches of at most `most` samples, equal to within one.

    Args:
        samples: the share; 0 gives one empty micro-batch.
        most: at least 1; None for no limit.
        min_batch: the smallest micro-batch, if the share has so many samples: rather than to go
            below it, a micro-batch takes more than `most`.
    """
    count = 1 if most is None else math.ceil(samples / most)
    return apportion(samples, [1] * max(1, min(count, samples // min_batch)))
