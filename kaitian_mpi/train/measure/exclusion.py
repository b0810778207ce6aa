"""Rank exclusion: finds ranks without which the job is faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from kaitian_mpi.balance.communication import FREE, AllreduceCost, exposed_seconds
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.fastest_split import fastest_split, plan_fastest
from kaitian_mpi.balance.forecast import Cohort, forecast
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.measure.allreduce import measure_allreduce

_MIN_GAIN = 0.05  # no device is excluded for less


def ranks_to_exclude(
    config: TrainingConfig,
    world: World,
    costs: Sequence[RankCost],
    errors: Sequence[float],
    buckets: Sequence[int],
    min_batch: int = 1,
) -> dict[int, str]:
    """Return the ranks to exclude because the job is faster without them, and why. Collective.

    First, ranks whose optimal share is 0 samples, if even their smallest share makes a step longer
    by 5% or more, beyond the uncertainty of its measurement. Then, since every rank adds
    communication, the device kind or host without which the forecast improves by as much. The
    allreduce without it is measured only if the job would gain that much even without any
    communication.
    """
    batch = config.global_batch_size

    @functools.cache
    def measured(*ranks: int) -> AllreduceCost:
        return measure_allreduce(config.allreduce, world, ranks, buckets)

    def step_sec(compute_sec: float) -> float:
        return compute_sec + exposed_seconds(compute_sec, buckets, measured(*range(world.size)))

    def rate(ranks: Sequence[int], allreduce: AllreduceCost) -> float:
        cohorts = [Cohort(world.infos[rank].kind, costs[rank]) for rank in ranks]
        return forecast(cohorts, batch, buckets, allreduce).samples_per_sec

    excluded = _too_slow(costs, errors, batch, min_batch, step_sec)
    remaining = [rank for rank in range(world.size) if rank not in excluded]
    candidates = _candidates(world.infos, remaining)
    now = best = rate(remaining, measured(*remaining)) if candidates else 0.0
    worst: dict[int, str] = {}
    for name, without in candidates.items():
        if rate(without, FREE) < (1 + _MIN_GAIN) * best:
            continue
        alone = rate(without, measured(*without))
        if alone >= (1 + _MIN_GAIN) * now and alone > best:
            best = alone
            text = f"the forecast is {now:.0f} samples/s with {name} and {alone:.0f} without"
            reason = f"{text}, including communication"
            worst = {rank: reason for rank in remaining if rank not in without}
    return excluded | worst


def _too_slow(
    costs: Sequence[RankCost],
    errors: Sequence[float],
    batch: int,
    min_batch: int,
    step_sec: Callable[[float], float],
) -> dict[int, str]:
    """Return the ranks whose smallest share makes a step 5% longer than it is without them.

    If computing takes microseconds, the ranks' times differ by noise alone, and a step lasts as
    long as its communication, which `step_sec` adds.
    """
    if batch < min_batch * len(costs):
        return {}  # the batch is too small; making the plan reports that
    slow = [rank for rank, share in enumerate(fastest_split(costs, batch)) if share < min_batch]
    if not slow:
        return {}
    others = [cost for rank, cost in enumerate(costs) if rank not in slow]
    plan = plan_fastest(others, batch, min_batch)
    compute_sec = max(cost.seconds(share) for cost, share in zip(others, plan, strict=True))
    longest_sec = compute_sec + _MIN_GAIN * step_sec(compute_sec)
    smallest = "a single sample takes" if min_batch == 1 else f"{min_batch} samples take"
    return {
        rank: f"{smallest} it {costs[rank].seconds(min_batch):.3g} s, but a whole step takes the "
        f"other ranks {compute_sec:.3g} s"
        for rank in slow
        if (1 - errors[rank]) * costs[rank].seconds(min_batch) >= longest_sec
    }


def _candidates(infos: Sequence[RankInfo], kept: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks that would remain without each kind and host that could be excluded."""
    subsets: dict[str, list[int]] = {}
    for trait in ("kind", "host"):
        for value in dict.fromkeys(getattr(infos[rank], trait) for rank in kept):
            without = [rank for rank in kept if getattr(infos[rank], trait) != value]
            if without and without not in subsets.values():
                subsets[f"{trait} {value}"] = without
    return subsets
