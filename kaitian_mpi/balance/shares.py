"""Splits samples into integer shares: equally, in proportion, or into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kaitian_mpi.errors import UserError


def plan_equal(ranks: int, global_batch_size: int, min_batch: int = 1) -> list[int]:
    """Divide the global batch equally, to within one sample."""
    check_enough(global_batch_size, ranks, min_batch)
    return apportion(global_batch_size, [1] * ranks)


def plan_by_paper(scores: Sequence[float], batch_size: int, min_batch: int = 1) -> list[int]:
    """Return batch_i = round(batch_size x score_i), at least `min_batch` (arXiv 2505.10183).

    The global batch size, their sum, grows with the number of devices.
    """
    return [max(min_batch, round(batch_size * score)) for score in scores]


def check_enough(global_batch_size: int, ranks: int, min_batch: int) -> None:
    """Raise a UserError if not every rank can have at least `min_batch` samples."""
    if global_batch_size >= min_batch * ranks:
        return
    least = "one sample" if min_batch == 1 else f"{min_batch} samples"
    why = "" if min_batch == 1 else f" because the model cannot train on fewer than {min_batch}"
    raise UserError(
        f"--global-batch-size {global_batch_size} is too small for {ranks} ranks, each of which "
        f"takes at least {least}{why}; give {min_batch * ranks} or more, or start fewer ranks"
    )


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
