"""What is known of how the ranks compute, from the benchmark on through the whole run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
from kaitian_mpi.mpi.exchange import faults_agreed, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World


class Profiles:
    """The profile of each rank by its place, the same on every rank.

    Attributes:
        by_place: the profiles.
        are_remembered: whether they come from an earlier job.
        min_batch: the fewest samples that the model can train on at once.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._results: dict[str, RankBenchmark] = {}
        self.by_place: dict[str, Profile] = {}
        self.are_remembered = False
        self.min_batch = 1

    @property
    def are_measured(self) -> bool:
        """Whether this job has benchmarked its ranks."""
        return bool(self._results)

    def find_out(
        self,
        world: World,
        made: Ingredients,
        slowdown: Slowdown,
        known: Mapping[str, Profile],
    ) -> None:
        """Remember, benchmark or, with `--balance off`, assume what the ranks are like. Collective.

        Args:
            world: all ranks.
            made: model and data.
            slowdown: this rank's emulated slowdown.
            known: the profiles that an earlier job has found out, by place.
        """
        self.min_batch = find_min_batch(self._config, world, made.model, made.data.train)
        places = [info.place for info in world.infos]
        # An earlier job with `--balance off` has measured nobody.
        self.are_remembered = set(places) <= set(known) and (
            self._config.balance == "off" or all(known[place].cost for place in places)
        )
        if self.are_remembered:
            self.by_place = dict(known)
        elif self._config.balance == "off":
            self.by_place = {place: profile_unmeasured(self._config) for place in places}
        else:
            data, least = made.data.train, self.min_batch
            results = benchmark_ranks(self._config, world, made.model, data, slowdown, least)
            self._results = dict(zip(places, results, strict=True))
            self.by_place = {place: profile_of(result) for place, result in self._results.items()}
            write_benchmark(world, made, results)

    def costs(self, infos: Sequence[RankInfo]) -> list[RankCost] | None:
        """Return what a step costs these ranks; None where any was not measured."""
        costs = [self.by_place[info.place].cost for info in infos]
        known = [cost for cost in costs if cost is not None]
        return known if len(known) == len(costs) else None

    def learn(
        self, world: World, infos: Sequence[RankInfo], costs: Sequence[RankCost] | None
    ) -> None:
        """Take over what training has found out about some ranks; all take the same. Collective.

        Args:
            world: the ranks that shall know it.
            infos: of the ranks that it is about.
            costs: of these; None where this rank has nothing to tell.
        """
        own = costs and {i.place: c.to_json() for i, c in zip(infos, costs, strict=True)}
        told: dict[str, Any] = next(filter(None, gather_values(world.comm, own)), {})
        for place, cost in told.items():
            profile = self.by_place[place]
            self.by_place[place] = dataclasses.replace(profile, cost=RankCost.from_json(cost))

    def plan(self, world: World) -> Plan:
        """Share the global batch by what is known of these ranks. Collective.

        Raises:
            AgreedError: it is too small for so many ranks.
        """
        profiles = [self.by_place[info.place] for info in world.infos]
        with faults_agreed(world.comm):
            return make_plan(self._config, world, profiles, self.min_batch)

    def show(self, world: World, made: Ingredients, plan: Plan) -> None:
        """Show what the benchmark has found out about these ranks, and their shares."""
        slowed = [describe_slowdown(made.slowdowns[info.world_rank]) for info in world.infos]
        results = [self._results[info.place] for info in world.infos]
        show_benchmark(world, results, plan.scores, plan.batch_sizes, slowed)
