"""Plans the ranks' batch sizes from their costs or scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.fastest_split import RankCost, fastest_split, remove_surplus
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.errors import UserError


def plan_fastest(
    costs: Sequence[RankCost], global_batch_size: int, min_batch: int = 1
) -> list[int]:
    """Divide the global batch for the shortest step, with a share for every rank.

    Args:
        costs: of each rank.
        global_batch_size: samples per step over all ranks.
        min_batch: the fewest samples that the model can train on.

    Returns:
        Samples per step, per rank, each at least `min_batch`; they sum to `global_batch_size`.

    Raises:
        UserError: there are too few samples for the ranks.
    """
    _check_enough(global_batch_size, len(costs), min_batch)
    costs = with_positive_slopes(costs, global_batch_size)
    shares = fastest_split(costs, global_batch_size, min_batch)
    if min(shares) > 0:
        return shares
    shares = [share or min_batch for share in shares]
    return remove_surplus(shares, costs, global_batch_size, min_batch, may_idle=False)


def plan_fastest_within(
    costs: Sequence[RankCost],
    global_batch_size: int,
    most: Sequence[int | None],
    min_batch: int = 1,
) -> list[int]:
    """Divide the global batch as `plan_fastest` does, but give no rank more than it may have.

    Args:
        costs: of each rank.
        global_batch_size: samples per step over all ranks.
        most: the largest batch size of each rank, at least `min_batch`; None for no limit.
        min_batch: the fewest samples that the model can train on.

    Raises:
        UserError: there are too few samples for the ranks.
        ValueError: together, the ranks may not have the whole global batch.
    """
    limits = [global_batch_size if limit is None else limit for limit in most]
    if sum(limits) < global_batch_size:
        raise ValueError(f"most must be at least {global_batch_size} in all, not {sum(limits)}")
    shares = plan_fastest(costs, global_batch_size, min_batch)
    # A limit only gives more to the others, so a rank beyond its limit stays at it.
    while any(share > limit for share, limit in zip(shares, limits, strict=True)):
        shares = [min(share, limit) for share, limit in zip(shares, limits, strict=True)]
        free = [rank for rank, limit in enumerate(limits) if shares[rank] < limit]
        left = global_batch_size - sum(shares) + sum(shares[rank] for rank in free)
        divided = plan_fastest([costs[rank] for rank in free], left, min_batch)
        for rank, share in zip(free, divided, strict=True):
            shares[rank] = share
    return shares


def plan_equal(ranks: int, global_batch_size: int, min_batch: int = 1) -> list[int]:
    """Divide the global batch equally, to within one sample.

    Raises:
        UserError: as in `plan_fastest`.
    """
    _check_enough(global_batch_size, ranks, min_batch)
    return apportion(global_batch_size, [1] * ranks)


def plan_by_paper(scores: Sequence[float], batch_size: int, min_batch: int = 1) -> list[int]:
    """Return batch_i = round(batch_size x score_i), at least `min_batch` (arXiv 2505.10183).

    The global batch size, their sum, grows with the number of devices.
    """
    return [max(min_batch, round(batch_size * score)) for score in scores]


def with_positive_slopes(costs: Sequence[RankCost], global_batch_size: int) -> list[RankCost]:
    """Return costs with a positive time per sample, as `fastest_split` requires.

    A fit to noisy times may be constant; it is replaced, keeping the time of an equal share.
    """
    equal_share = max(1.0, global_batch_size / len(costs))
    return [_with_slope(cost, equal_share) for cost in costs]


def _check_enough(global_batch_size: int, ranks: int, min_batch: int) -> None:
    if global_batch_size >= min_batch * ranks:
        return
    each = "one sample" if min_batch == 1 else f"{min_batch} samples"
    why = "" if min_batch == 1 else f" because the model cannot train on fewer than {min_batch}"
    raise UserError(
        f"--global-batch-size {global_batch_size} is too small for {ranks} ranks, each of which "
        f"takes at least {each}{why}; give {min_batch * ranks} or more, or start fewer ranks"
    )


def _with_slope(cost: RankCost, samples: float) -> RankCost:
    if cost.model.beta_sec > 0:
        return cost
    slope = max(cost.model.alpha_sec, 1e-12) / samples
    return dataclasses.replace(cost, model=CostModel(0.0, slope))
