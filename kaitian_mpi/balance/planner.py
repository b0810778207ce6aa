"""From what the ranks cost, or their scores, to batch sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.optimum import RankCost, fastest_split
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.errors import UserError


def plan_fastest(costs: Sequence[RankCost], global_batch_size: int) -> list[int]:
    """Share the global batch so that the slowest rank ends first; each gets at least one sample.

    Args:
        costs: of each rank.
        global_batch_size: samples per step of the whole job.

    Returns:
        Samples per step of each rank; they sum to `global_batch_size`.

    Raises:
        UserError: there are fewer samples than ranks.
    """
    _check_enough(global_batch_size, len(costs))
    return _at_least_one_each(
        fastest_split(with_slopes(costs, global_batch_size), global_batch_size)
    )


def plan_equal(ranks: int, global_batch_size: int) -> list[int]:
    """Share the global batch equally, to within one sample.

    Raises:
        UserError: as `plan_fastest`.
    """
    _check_enough(global_batch_size, ranks)
    return apportion(global_batch_size, [1] * ranks)


def plan_batches_as_paper(scores: Sequence[float], batch_size: int) -> list[int]:
    """Return batch_i = round(batch_size x score_i), at least 1 (KAITIAN, arXiv 2505.10183).

    The global batch, their sum, grows with the devices.
    """
    return [max(1, round(batch_size * score)) for score in scores]


def with_slopes(costs: Sequence[RankCost], global_batch_size: int) -> list[RankCost]:
    """Return costs by which more samples take more time, as `fastest_split` needs them.

    Noise can have fitted a constant; the time of an equal share is kept then.
    """
    equal_share = max(1.0, global_batch_size / len(costs))
    return [_with_slope(cost, equal_share) for cost in costs]


def _check_enough(global_batch_size: int, ranks: int) -> None:
    if global_batch_size < ranks:
        raise UserError(
            f"--global-batch-size: found {global_batch_size} for {ranks} ranks, needed at "
            f"least one sample a rank; give {ranks} or more, or start fewer ranks"
        )


def _with_slope(cost: RankCost, samples: float) -> RankCost:
    if cost.model.beta_sec > 0:
        return cost
    slope = max(cost.model.alpha_sec, 1e-12) / samples
    return dataclasses.replace(cost, model=CostModel(0.0, slope))


def _at_least_one_each(batches: list[int]) -> list[int]:
    for rank, batch in enumerate(batches):
        if batch == 0:
            batches[batches.index(max(batches))] -= 1
            batches[rank] = 1
    return batches
