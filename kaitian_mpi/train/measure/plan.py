"""Plans the ranks' batch sizes from the benchmark; writes plan.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kaitian_mpi.balance.cost_model import RankCost, scores
from kaitian_mpi.balance.shares import plan_by_paper, plan_equal, plan_fastest
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.measure.rank_timer import RankMeasurement, equal_share
from kaitian_mpi.train.setup import Setup

FROM_BENCHMARK = "the benchmark"


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


def profile_of(result: RankMeasurement) -> Profile:
    """Return the profile from a rank's benchmark."""
    return Profile(result.cost, result.memory_format, result.precision)


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
        UserError: the global batch is too small for this number of ranks, or too large for
            `--sync-bn`.
    """
    costs = [profile.cost for profile in profiles if profile.cost is not None]
    # With `--balance off` an earlier job of the run may have measured them.
    measured = len(costs) == len(profiles) and config.balance != "off"
    share = equal_share(config, world.size)
    by_rank = scores([c.seconds(share) for c in costs]) if measured else [1.0] * world.size
    batch = config.global_batch_size
    most = [c.largest_micro_batch for c in costs] if measured and config.sync_bn else None
    if config.batch_policy == "paper":
        shares = plan_by_paper(by_rank, config.batch_size, min_batch)
        _check_memory(most, shares)
    elif measured:
        _check_memory(most, [batch])
        shares = plan_fastest(costs, batch, min_batch, most)
    else:
        shares = plan_equal(world.size, batch, min_batch)
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


def _check_memory(most: Sequence[int | None] | None, wanted: Sequence[int]) -> None:
    """Check that the ranks can compute their shares at once, or any shares of a single batch.

    Raises:
        UserError: they cannot.
    """
    limits = [math.inf if limit is None else limit for limit in most or ()]
    held = [sum(limits)] if len(wanted) == 1 else limits
    if limits and any(samples > limit for samples, limit in zip(wanted, held, strict=True)):
        raise UserError(
            "--sync-bn computes a step without micro-batches, and the ranks' memory holds "
            f"{held} of {list(wanted)} samples; give a smaller batch, or start more ranks"
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
