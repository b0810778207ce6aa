"""What is known of how the ranks compute, from the benchmark on through the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kaitian_mpi.balance.optimum import RankCost
from kaitian_mpi.benchmark.min_batch import find_min_batch
from kaitian_mpi.benchmark.plan import (
    Plan,
    Profile,
    make_plan,
    profile_of,
    profile_unmeasured,
    write_benchmark,
)
from kaitian_mpi.benchmark.ranks import RankBenchmark, benchmark_ranks, show_benchmark
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import Slowdown, describe_slowdown
from kaitian_mpi.engine.setup import Ingredients
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World


@dataclass(frozen=True)
class Profiles:
    """The profile of each rank by its place, the same on every rank."""

    by_place: Mapping[str, Profile]
    min_batch: int = 1
    """The fewest samples that the model can train on at once."""
    are_remembered: bool = False
    """Whether they come from an earlier job."""
    measured: Mapping[str, RankBenchmark] = field(default_factory=dict)
    """This job's benchmark, by place; empty where there was none."""

    def costs(self, infos: Sequence[RankInfo]) -> list[RankCost] | None:
        """Return what a step costs these ranks; None where any was not measured."""
        costs = [self.by_place[info.place].cost for info in infos]
        known = [cost for cost in costs if cost is not None]
        return known if len(known) == len(costs) else None

    def learn(self, world: World, costs: Mapping[str, RankCost]) -> Profiles:
        """Return these with the costs that training has found; all ranks use the same. Collective.

        Args:
            world: the active ranks.
            costs: by place; empty where this rank knows none.
        """
        own = {place: cost.to_json() for place, cost in costs.items()}
        known: dict[str, Any] = next(filter(None, gather_values(world.comm, own)), {})
        learned = {
            place: replace(self.by_place[place], cost=RankCost.from_json(cost))
            for place, cost in known.items()
        }
        return replace(self, by_place={**self.by_place, **learned})

    def plan(self, config: TrainConfig, world: World) -> Plan:
        """Share the global batch by what is known of these ranks. Collective.

        Raises:
            AgreedError: it is too small for so many ranks.
        """
        profiles = [self.by_place[info.place] for info in world.infos]
        with agree_on_errors(world.comm):
            return make_plan(config, world, profiles, self.min_batch)

    def show(self, world: World, made: Ingredients, plan: Plan) -> None:
        """Show what the benchmark has found out about these ranks, and their batch sizes."""
        slowed = [describe_slowdown(made.slowdowns[info.world_rank]) for info in world.infos]
        results = [self.measured[info.place] for info in world.infos]
        show_benchmark(world, results, plan.scores, plan.batch_sizes, slowed)


def find_profiles(
    config: TrainConfig,
    world: World,
    made: Ingredients,
    slowdown: Slowdown,
    known: Mapping[str, Profile],
) -> Profiles:
    """Remember, benchmark or, with `--balance off`, assume what the ranks are like. Collective.

    Args:
        config: the benchmark's settings.
        world: all ranks.
        made: model and data.
        slowdown: this rank's emulated slowdown.
        known: the profiles that an earlier job has found, by place.
    """
    min_batch = find_min_batch(config, world, made.model, made.data.train)
    places = [info.place for info in world.infos]
    # An earlier job with `--balance off` has measured none.
    are_remembered = set(places) <= set(known) and (
        config.balance == "off" or all(known[place].cost for place in places)
    )
    if are_remembered:
        return Profiles(dict(known), min_batch, are_remembered=True)
    if config.balance == "off":
        return Profiles({place: profile_unmeasured(config) for place in places}, min_batch)
    results = benchmark_ranks(config, world, made.model, made.data.train, slowdown, min_batch)
    measured = dict(zip(places, results, strict=True))
    profiles = {place: profile_of(result) for place, result in measured.items()}
    write_benchmark(world, made, results)
    return Profiles(profiles, min_batch, measured=measured)
