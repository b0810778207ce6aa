"""Trainings in each layout whose shares, stages and owners are given, not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from kaitian_mpi.balance import layouts as predictions
from kaitian_mpi.balance import ownership
from kaitian_mpi.balance.ownership import Pair, with_mirrors
from kaitian_mpi.balance.pipeline import PipelinePlan
from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.distributed import shard_reducer
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.experts.expert_owners import ExpertOwners
from kaitian_mpi.train.layouts.pipeline.measure import PipelineFacts, StagesPlan
from kaitian_mpi.train.layouts.shard import memory_budget, shard_layout, shards
from kaitian_mpi.train.measure.plan import Plan, Profiles

LAYOUTS = "replicate", "shard", "mirrors", "parts", "pipeline"
"""As --layout has them; and shard with mirrors, and, as `parts`, with sharded parameters."""


def settings_of(layout: str) -> dict[str, Any]:
    """Return the settings of a training in a layout."""
    name = layout if layout in ("replicate", "pipeline", "experts") else "shard"
    return {"layout": name, "mirrors": layout != "shard"}


class MirroredBudget(memory_budget.MemoryBudget):
    """Memory that is enough for mirrors, also without fault tolerance."""

    def owners(self, config: Any, world: World) -> tuple[list[Pair], str]:
        memory = [self.by_place[info.place] for info in world.infos]
        if sum(each > 0 for each in memory) < 2:
            return super().owners(config, world)
        return with_mirrors(memory, [str(rank) for rank in range(world.size)]), ""


@contextmanager
def given_layout(
    layout: str,
    *,
    shares: Callable[[], list[int]],
    stages: Callable[[int], PipelinePlan],
    memory: Callable[[], Sequence[float]],
    sharded: Callable[[frozenset[int]], frozenset[int]] = lambda numbers: numbers,
    experts: Callable[[int], tuple[list[int], list[int]]] | None = None,
    bucket_caps: tuple[int, int] = (128, 512),
) -> Iterator[None]:
    """Begin loops with these plans, and with buckets so small that small models have several.

    Args:
        layout: one of `LAYOUTS`, or a name for another.
        shares: returns the ranks' batch sizes.
        stages: returns the stages, given the number of layers.
        memory: returns the ranks' memory, in proportion.
        experts: returns each expert's rank, and that of its mirror, given the number of experts.
        sharded: returns which parameters are sharded, given the numbers of those that can be.
        bucket_caps: the bytes of the buckets of a layout that sums to owners.
    """
    plan_of, find_memory_budget = Profiles.plan, memory_budget.find_memory_budget

    def plan(*args: Any) -> Plan:
        return replace(plan_of(*args), batch_sizes=shares())

    def plan_stages(facts: PipelineFacts, config: Any, world: World, min_batch: int) -> StagesPlan:
        planned = stages(len(facts.layers))
        sizes = split_micro_batches(config.global_batch_size, planned.micro_batch, min_batch)
        return StagesPlan(
            batch_sizes=planned.first_samples(sizes, world.size),
            scores=[1.0] * world.size,
            costs=None,
            micro_batch_size=planned.micro_batch,
            min_batch=min_batch,
            pipeline=planned,
        )

    def given_budget(
        setup: Any, config: Any, world: World
    ) -> tuple[memory_budget.MemoryBudget, int]:
        _, reserved = find_memory_budget(setup, config, world)
        optimizers = setup.task.make_optimizers(setup.task.model)
        needs, numbers = memory_budget.shard_needs(config, setup.task.model, optimizers)
        enough = 9.0 * needs[-1].owned
        places = [info.place for info in world.infos]
        by_place = {place: enough * each for place, each in zip(places, memory(), strict=True)}
        is_sharded = layout == "parts" and len(needs) > 1
        kind = MirroredBudget if layout == "mirrors" else memory_budget.MemoryBudget
        chosen = sharded(numbers) if is_sharded else frozenset()
        return kind(by_place, needs[is_sharded], chosen), reserved

    assign_experts = ExpertOwners.assign_experts

    def given_experts(
        owners: ExpertOwners, world: World, ranks: Sequence[int], mirrors: Sequence[int]
    ) -> None:
        assign_experts(owners, world, *(experts(len(ranks)) if experts else (ranks, mirrors)))

    with ExitStack() as patches:
        for owner, name, value in (
            (Profiles, "plan", plan),
            (ExpertOwners, "assign_experts", given_experts),
            (PipelineFacts, "plan", plan_stages),
            (shard_layout, "find_memory_budget", given_budget),
            (memory_budget, "_MIN_SHARDED_BYTES", 64),
            *_small_buckets(bucket_caps),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def _small_buckets(caps: tuple[int, int]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what to set so that buckets are small, each as its owner, name and value."""
    for module in (ownership, predictions, shard_reducer, shards, memory_budget):
        if hasattr(module, "BUCKET_CAPS"):
            yield module, "BUCKET_CAPS", caps
    defaults = shard_reducer.ShardReducer.__init__.__kwdefaults__
    if "bucket_caps" in defaults:
        yield (
            shard_reducer.ShardReducer.__init__,
            "__kwdefaults__",
            {**defaults, "bucket_caps": caps},
        )
