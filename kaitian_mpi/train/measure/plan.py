"""The ranks' profiles, measured or remembered, and the batch sizes planned from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kaitian_mpi.balance.cost_model import RankCost, scores
from kaitian_mpi.balance.shares import plan_by_paper, plan_equal, plan_fastest
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.measure.min_batch import find_min_batch
from kaitian_mpi.train.measure.rank_benchmark import (
    benchmark_ranks,
    show_benchmark,
    write_benchmark,
)
from kaitian_mpi.train.measure.rank_timer import RankMeasurement, Workload, equal_share
from kaitian_mpi.train.setup import Setup

FROM_BENCHMARK = "the benchmark"
_MAX_SEC_OF_NEW_RANKS = 3.0  # while all others wait


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


@dataclass(frozen=True)
class Profiles:
    """The profile of each rank by its place, the same on every rank."""

    by_place: Mapping[str, Profile]
    min_batch: int = 1
    """The fewest samples that the model can train on at once."""
    are_remembered: bool = False
    """Whether they come from an earlier job."""
    measured: Mapping[str, RankMeasurement] = field(default_factory=dict)
    """This job's benchmark results, by place; empty if there was no benchmark."""

    def costs(self, infos: Sequence[RankInfo]) -> list[RankCost] | None:
        """Return these ranks' costs; None if any was not measured."""
        costs = [self.by_place[info.place].cost for info in infos]
        known = [cost for cost in costs if cost is not None]
        return known if len(known) == len(costs) else None

    def fit_errors(self, infos: Sequence[RankInfo]) -> list[float]:
        """Return the relative errors of these ranks' costs; 0 if this job did not measure it."""
        found = [self.measured.get(info.place) for info in infos]
        return [0.0 if result is None else result.fit_error for result in found]

    def learn(self, world: World, costs: Mapping[str, RankCost]) -> Profiles:
        """Return these, updated with costs estimated while training; the same on all ranks.

        Collective.
        """
        own = {place: cost.to_json() for place, cost in costs.items()}
        known: dict[str, Any] = next(filter(None, gather_values(world.comm, own)), {})
        learned = {
            place: replace(self.by_place[place], cost=RankCost.from_json(cost))
            for place, cost in known.items()
        }
        return replace(self, by_place={**self.by_place, **learned})

    def plan(self, config: TrainingConfig, world: World) -> Plan:
        """Plan the batch sizes of these ranks. Collective."""
        profiles = [self.by_place[info.place] for info in world.infos]
        with agree_on_errors(world.comm):
            return make_plan(config, world, profiles, self.min_batch)

    def show(self, world: World, setup: Setup, plan: Plan) -> None:
        """Print the benchmark's results for these ranks, and their batch sizes."""
        results = [self.measured[info.place] for info in world.infos]
        show_benchmark(world, results, plan.scores, plan.batch_sizes)


def find_profiles(
    config: TrainingConfig, world: World, setup: Setup, known: Mapping[str, Profile]
) -> Profiles:
    """Remember, benchmark or assume what the ranks are like. Collective.

    Without a loss there is nothing to benchmark: then training itself shows what a step costs.
    """
    min_batch = find_min_batch(config, world, setup)
    places = [info.place for info in world.infos]
    # The profiles of an earlier job with `--balance off` have no costs.
    missing = {
        info.host
        for info in world.infos
        if info.place not in known or (config.balance != "off" and known[info.place].cost is None)
    }
    if not missing:
        return Profiles(dict(known), min_batch, are_remembered=True)
    if config.balance == "off" or setup.task.loss is None:
        return Profiles(dict.fromkeys(places, profile_unmeasured(config)), min_batch)
    new = [rank for rank, info in enumerate(world.infos) if info.host in missing]
    if len(new) < world.size:
        seconds = min(config.benchmark_seconds, _MAX_SEC_OF_NEW_RANKS)
        config = replace(config, benchmark_seconds=seconds)
        print_rank_0(world, f"benchmarking only what is new: hosts {', '.join(sorted(missing))}")
    results = benchmark_ranks(Workload(config, world, setup, min_batch), new)
    measured = {places[rank]: result for rank, result in results.items()}
    profiles = {place: profile_of(result) for place, result in measured.items()}
    if len(new) < world.size:
        return Profiles({**known, **profiles}, min_batch)
    write_benchmark(world, setup, list(results.values()))
    return Profiles(profiles, min_batch, measured=measured)


def make_plan(
    config: TrainingConfig, world: World, profiles: Sequence[Profile], min_batch: int = 1
) -> Plan:
    """Plan the batch sizes from the ranks' costs or scores; equal if any rank was not measured."""
    costs = [profile.cost for profile in profiles if profile.cost is not None]
    # With `--balance off` an earlier job of the run may have measured them.
    measured = len(costs) == len(profiles) and config.balance != "off"
    share = equal_share(config, world.size)
    by_rank = scores([c.seconds(share) for c in costs]) if measured else [1.0] * world.size
    batch = config.global_batch_size
    most = [c.largest_micro_batch for c in costs] if measured and config.sync_bn else None
    if config.batch_policy == "paper":
        shares = plan_by_paper(by_rank, config.batch_size, min_batch)
        if any(limit and share > limit for limit, share in zip(most or (), shares, strict=False)):
            raise UserError("--sync-bn: --batch-size does not fit the ranks' memory; lower it")
    elif measured:
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
