"""Plans the ranks' batch sizes from the benchmark; writes plan.jsonl and benchmark.json."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kaitian_mpi.balance.cost_model import RankCost, scores
from kaitian_mpi.balance.shares import (
    plan_by_paper,
    plan_equal,
    plan_fastest,
)
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.measure.rank_benchmark import RankBenchmark, scores_of
from kaitian_mpi.train.measure.rank_timer import equal_share
from kaitian_mpi.train.setup import Setup

FROM_BENCHMARK = "the benchmark"
_BENCHMARK = "benchmark.json"


@dataclass(frozen=True)
class Plan:
    """The ranks' batch sizes, and this rank's memory format and precision."""

    batch_sizes: list[int]
    scores: list[float]
    costs: list[RankCost] | None
    """Of each rank; None without a benchmark."""
    memory_format: str
    precision: str
    micro_batch_size: int | None
    """The most samples that this rank computes at once; None: no limit."""
    min_batch: int = 1
    """The fewest samples that a rank computes at once in training."""


@dataclass(frozen=True)
class Profile:
    """How one rank computes: its cost, memory format and precision."""

    cost: RankCost | None
    """None if the rank was not measured."""
    memory_format: str
    precision: str


def profile_unmeasured(config: TrainingConfig) -> Profile:
    """Return the profile of a rank that was not measured."""
    return Profile(
        cost=None,
        # Convolutions were faster in channels_last on every device tried.
        memory_format="channels_last" if config.memory_format == "auto" else config.memory_format,
        precision="fp32" if config.precision == "auto" else config.precision,
    )


def profile_of(result: RankBenchmark) -> Profile:
    """Return the profile from a rank's benchmark."""
    return Profile(result.cost, result.measured.memory_format, result.measured.precision)


def make_plan(
    config: TrainingConfig, world: World, profiles: Sequence[Profile], min_batch: int = 1
) -> Plan:
    """Plan the batch sizes from the ranks' costs or scores; equal if any rank was not measured.

    Args:
        config: the global batch size and the batch policy.
        world: the ranks that train.
        profiles: these ranks' profiles.
        min_batch: the fewest samples that the model can train on at once.

    Raises:
        UserError: the global batch is too small for this number of ranks.
    """
    costs = [profile.cost for profile in profiles if profile.cost is not None]
    # With `--balance off` an earlier job of the run may have measured them.
    measured = len(costs) == len(profiles) and config.balance != "off"
    share = equal_share(config, world.size)
    times = [cost.seconds(share) for cost in costs]
    by_rank = scores(times) if measured else [1.0] * world.size
    if config.batch_policy == "paper":
        shares = plan_by_paper(by_rank, config.batch_size, min_batch)
    elif measured and config.sync_bn:
        most = [cost.largest_micro_batch for cost in costs]
        shares = plan_fastest(costs, _check_fits(config, most), min_batch, most)
    elif measured:
        shares = plan_fastest(costs, config.global_batch_size, min_batch)
    else:
        shares = plan_equal(world.size, config.global_batch_size, min_batch)
    if config.sync_bn and measured:
        _check_at_once(world, costs, shares)
    own = profiles[world.rank]
    return Plan(
        shares,
        by_rank,
        costs if measured else None,
        own.memory_format,
        own.precision,
        own.cost.largest_micro_batch if own.cost else config.micro_batch_size or None,
        min_batch,
    )


def _check_fits(config: TrainingConfig, most: Sequence[int | None]) -> int:
    """Return the global batch size, if the ranks can compute it without micro-batches.

    Raises:
        UserError: they cannot.
    """
    limits = [limit for limit in most if limit is not None]
    if len(limits) == len(most) and sum(limits) < config.global_batch_size:
        raise UserError(
            f"--sync-bn computes a step without micro-batches, but of --global-batch-size "
            f"{config.global_batch_size} the ranks' memory holds {sum(limits)} samples; give a "
            "smaller global batch, or start more ranks"
        )
    return config.global_batch_size


def _check_at_once(world: World, costs: Sequence[RankCost], shares: Sequence[int]) -> None:
    """Check that each rank can compute its share without micro-batches.

    Raises:
        UserError: one cannot.
    """
    for info, cost, share in zip(world.infos, costs, shares, strict=True):
        if cost.micro_batches(share) > 1:
            raise UserError(
                f"--sync-bn computes a step without micro-batches, but the memory of {info} holds "
                f"{cost.largest_micro_batch} of its {share} samples; give a smaller batch, or "
                "start without that rank"
            )


def record_plan(
    world: World, setup: Setup, plan: Plan, step: int, reason: str, sinks: Sinks
) -> None:
    """Record a plan in plan.jsonl, and log it unless the benchmark's table has shown it."""
    text = f"samples per step and rank {plan.batch_sizes} ({reason})"
    if reason != FROM_BENCHMARK:
        print_rank_0(world, text)
    ranks = [info.world_rank for info in world.infos]
    line: dict[str, Any] = {"batch_sizes": plan.batch_sizes, "reason": reason}
    setup.folder.append("plan.jsonl", {"step": step, "time": time.time(), "ranks": ranks, **line})
    sinks.event("plan", step, text, ranks, **line)


def write_benchmark(world: World, setup: Setup, results: list[RankBenchmark]) -> None:
    """Write benchmark.json: what was measured on each rank."""
    share = math.ceil(sum(r.measured.batches[-1] for r in results) / len(results))
    ranks = [
        {
            "rank": info.world_rank,
            "host": info.host,
            "device_kind": info.kind,
            "device": info.device,
            "alpha_sec": result.cost.alpha_sec,
            "beta_sec_per_sample": result.cost.beta_sec,
            "fit_error": result.fit_error,
            "largest_micro_batch": result.cost.largest_micro_batch,
            "seconds_by_batch": dict(
                zip(result.measured.batches, result.measured.seconds, strict=True)
            ),
            "from_cache": result.from_cache,
            "memory_bytes": info.memory_bytes,
            "memory_format": result.measured.memory_format,
            "precision": result.measured.precision,
            "score": score,
            "emulated_slowdown": info.slowdown,
        }
        for info, result, score in zip(world.infos, results, scores_of(results, share), strict=True)
    ]
    setup.folder.write(_BENCHMARK, {"ranks": ranks, "emulated": is_emulated(world)})


def record_allreduce(setup: Setup, seconds: Mapping[str, float]) -> None:
    """Add the measured algorithms to benchmark.json; nothing if none was measured.

    Args:
        setup: whose folder.
        seconds: by algorithm, for all buckets of a step.
    """
    if seconds:
        known = setup.folder.read(_BENCHMARK)
        setup.folder.write(_BENCHMARK, {**known, "allreduce_sec": dict(seconds)})


def is_emulated(world: World) -> bool:
    """Return whether any device kind or slowdown of the run is emulated."""
    return any(info.emulated or info.slowdown for info in world.infos)
