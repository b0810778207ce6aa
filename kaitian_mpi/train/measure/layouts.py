"""Chooses the layout of a job by measurement, for `--layout auto`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from kaitian_mpi.balance.communication import FREE, AllreduceCost
from kaitian_mpi.balance.cost_model import RankCost, fit
from kaitian_mpi.balance.layouts import (
    PIPELINE,
    LayoutJob,
    LayoutRank,
    Prediction,
    choose,
    predict_layouts,
    table_of,
)
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values, time_in_rounds
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, show_table
from kaitian_mpi.train.measure.allreduce import (
    choose_algorithm,
    gradient_buckets,
    measure_allreduce,
)
from kaitian_mpi.train.measure.plan import min_batch_by_layers
from kaitian_mpi.train.pipeline.measure import PipelineFacts, check_task, find_facts
from kaitian_mpi.train.setup import Setup

if TYPE_CHECKING:
    from kaitian_mpi.distributed.process_group import KaitianProcessGroup

FILE = "layouts.json"
_LARGEST, _PART_OF_MEMORY = 8 << 20, 0.01  # of what is exchanged, in bytes
_ROUNDS, _MAX_SEC = 6, 1.0


def choose_layout(
    config: TrainingConfig, setup: Setup, world: World
) -> tuple[str, PipelineFacts | None]:
    """Return the fastest layout of those that fit the ranks' memory, and facts of the layers.

    Collective. The facts are there if it is a pipeline.

    Prints all with their steps and memory, and writes them to layouts.json.

    Raises:
        AgreedError: none fits.
    """
    job, facts = measure_layouts(config, setup, world)
    predictions = predict_layouts(job)
    # Other ranks may round otherwise.
    own = [asdict(each) for each in predictions]
    predictions = [Prediction(**each) for each in gather_values(world.comm, own)[0]]
    chosen = choose(predictions)
    setup.folder.write(FILE, {"layouts": own, "chosen": chosen.layout if chosen else None})
    show_table(world, "layouts, as predicted", table_of(predictions), left=("layout", ""))
    if chosen is None:
        nearest = "; ".join(f"{each.layout}: {each.why}" for each in predictions)
        raise AgreedError(
            f"the model fits the ranks' memory in no layout ({nearest}); start more ranks, or use "
            "a smaller model or an optimizer with less state; see docs/large-models.md"
        )
    print_rank_0(world, f"layout {chosen.layout}: the fastest that fits (--layout sets another)")
    return chosen.layout, facts if chosen.layout == PIPELINE else None


def measure_layouts(
    config: TrainingConfig, setup: Setup, world: World
) -> tuple[LayoutJob, PipelineFacts]:
    """Measure what the layouts are compared by, and return the facts of the layers. Collective."""
    task, min_batch = setup.task, min_batch_by_layers(setup.task.model)
    try:
        chain, why = check_task(task), ""
    except UserError as error:
        chain, why = [task.model], str(error)
    if config.sync_bn:
        why = "--sync-bn needs the statistics of a step, and micro-batches have their own"
    facts = find_facts(config, setup, world, chain)
    buckets = gradient_buckets(task.model)
    # What is allocated for it stays with the process.
    memory = min(rank.memory_bytes for rank in facts.by_place.values())
    most = max(1 << 16, min(_LARGEST, int(_PART_OF_MEMORY * memory)))
    scatter, gather = measure_exchange(world, most)
    job = LayoutJob(
        tuple(_whole(facts, info.place) for info in world.infos),
        parameter_bytes=sum(layer.weight_bytes for layer in facts.layers),
        trained_bytes=sum(buckets),
        state_bytes=sum(layer.state_bytes for layer in facts.layers),
        kept_bytes=sum(layer.kept_bytes for layer in facts.layers),
        largest_bytes=max(parameter.nbytes for parameter in task.model.parameters()),
        global_batch=config.global_batch_size,
        min_batch=min_batch,
        allreduce_cost=_measure_allreduce(config, world, [min(most, sum(buckets))]),
        scatter_cost=scatter,
        gather_cost=gather,
        on_host=any(info.is_on_host for info in world.infos),
        pipeline=None if why else facts.job(config, world, min_batch),
        no_pipeline=why,
    )
    return job, facts


def _whole(facts: PipelineFacts, place: str) -> LayoutRank:
    rank = facts.by_place[place]
    cost = RankCost(sum(rank.fixed_sec), sum(rank.sample_sec))
    rates = rank.update_sec_per_byte, rank.copy_sec_per_byte
    return LayoutRank(rank.kind, cost, rank.memory_bytes, *rates)


def _measure_allreduce(config: TrainingConfig, world: World, buckets: list[int]) -> AllreduceCost:
    group, sizes = cast("KaitianProcessGroup", dist.group.WORLD), [size // 4 for size in buckets]
    choose_algorithm(group, config.allreduce, sizes, world.device, world.relay.wire)
    return measure_allreduce(config.allreduce, world, range(world.size), buckets)


def measure_exchange(world: World, most: int) -> tuple[AllreduceCost, AllreduceCost]:
    """Return the cost of a sum in parts, and of bringing all parts to all ranks. Collective.

    It is measured with up to `most` bytes.
    """
    if world.size == 1:
        return FREE, FREE
    sizes, works = (most // 16, most), dict[tuple[str, int], Any]()
    for size in sizes:
        whole = torch.zeros(size // 4, device=world.device)
        parts = [*whole.tensor_split(world.size)]
        own = torch.empty_like(parts[world.rank])
        works["scatter", size] = partial(dist.reduce_scatter, own, parts)
        works["gather", size] = partial(dist.all_gather, parts, own)
    seconds = time_in_rounds(world.comm, works, _ROUNDS, _MAX_SEC)
    costs = []
    for name in ("scatter", "gather"):
        line = fit(sizes, [seconds[name, size] for size in sizes])
        costs.append(AllreduceCost(line.alpha_sec, line.beta_sec))
    return costs[0], costs[1]
