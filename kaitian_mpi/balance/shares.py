"""Splits a number of samples in integer shares: a step's, a micro-batch's, a plan's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.fastest_split import fastest_split
from kaitian_mpi.errors import UserError


def plan_fastest(
    costs: Sequence[RankCost],
    global_batch_size: int,
    min_batch: int = 1,
    most: Sequence[int | None] | None = None,
) -> list[int]:
    """Divide the global batch for the shortest step, with at least `min_batch` for every rank.

    `most` are the largest shares, None for no limit.
    """
    _check_enough(global_batch_size, len(costs), min_batch)
    limits = [
        global_batch_size if limit is None else limit for limit in most or [None] * len(costs)
    ]
    if sum(limits) < global_batch_size:
        raise UserError(
            f"--sync-bn computes a step without micro-batches, and of --global-batch-size "
            f"{global_batch_size} the ranks' memory holds {sum(limits)} samples; give a smaller "
            "global batch, or start more ranks"
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
    each = "one sample" if min_batch == 1 else f"{min_batch} samples"
    why = "" if min_batch == 1 else f" because the model cannot train on fewer than {min_batch}"
    raise UserError(
        f"--global-batch-size {global_batch_size} is too small for {ranks} ranks, each of which "
        f"takes at least {each}{why}; give {min_batch * ranks} or more, or start fewer ranks"
    )


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` in proportion to `weights` by the method of largest remainders.

    Every share is its exact quota rounded down, or that plus one; leftover units go to the largest
    remainders, with ties to the lower index. The same input gives the same shares on every machine.

    Returns:
        One share per weight; they sum to `total`.
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
