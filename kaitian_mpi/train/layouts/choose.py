"""Chooses the layout of a job by measurement, for `--layout auto`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.balance.communication import FREE, AllreduceCost
from kaitian_mpi.balance.cost_model import RankCost, fit
from kaitian_mpi.balance.experts import ExpertsJob
from kaitian_mpi.balance.layouts import (
    EXPERTS,
    PIPELINE,
    REPLICATE,
    SHARD,
    LayoutJob,
    Prediction,
    choose,
    predict_layouts,
    prediction_table,
)
from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.balance.pipeline_cost import Layer, PipelineJob
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.gradients import uses_library
from kaitian_mpi.distributed.pending_parameter import is_compiled
from kaitian_mpi.distributed.shard_buckets import BufferPool, ShardBucket
from kaitian_mpi.errors import AgreedError, LayerTooLargeError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values, time_in_rounds
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, show_table
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.train.layouts.divided_step import check_parts
from kaitian_mpi.train.layouts.experts.expert_owners import check_experts, find_mixtures
from kaitian_mpi.train.layouts.experts.measure import ExpertFacts
from kaitian_mpi.train.layouts.experts.measure import find_facts as find_expert_facts
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.pipeline.layer_timer import LayerBytes, layers_of
from kaitian_mpi.train.layouts.pipeline.measure import PipelineFacts, find_facts
from kaitian_mpi.train.layouts.pipeline.pipeline_layout import PipelineLayout
from kaitian_mpi.train.layouts.replicate import ReplicateLayout
from kaitian_mpi.train.layouts.shard.memory_budget import shard_needs
from kaitian_mpi.train.layouts.shard.shard_layout import ShardLayout
from kaitian_mpi.train.measure.allreduce import (
    choose_algorithm,
    gradient_buckets,
    measure_allreduce,
)
from kaitian_mpi.train.measure.plan import (
    Plan,
    Profiles,
    min_batch_by_layers,
    profile_unmeasured,
)
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Task

if TYPE_CHECKING:
    from kaitian_mpi.distributed.process_group import KaitianProcessGroup

FILE = "layouts.json"
_LARGEST, _PART_OF_MEMORY = 8 << 20, 0.01  # of what is exchanged, in bytes
_ROUNDS, _MAX_SEC = 6, 1.0
_ALIKE = RankCost(0.0, 1e-6)  # of ranks whose rows are not timed
_LEAST_DENSE = 0.05  # of a model's time, without its experts: a difference of two measurements


def choose_layout(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    """Return the fastest layout of those that fit the ranks' memory. Collective.

    Prints all with their steps and memory, and writes them to layouts.json.

    Raises:
        AgreedError: none fits.
    """
    try:
        job, facts, expert_facts = measure_layouts(config, setup, world)
    except LayerTooLargeError as error:
        return _find_without_times(config, setup, world, error)
    predictions = predict_layouts(job)
    # Other ranks may round otherwise.
    all_predictions = [asdict(prediction) for prediction in predictions]
    all_predictions = gather_values(world.comm, all_predictions)[0]
    predictions = [Prediction(**prediction) for prediction in all_predictions]
    chosen = choose(predictions)
    name = chosen.layout if chosen else None
    setup.folder.write(FILE, {"layouts": all_predictions, "chosen": name})
    show_table(world, "layouts, as predicted", prediction_table(predictions), left=("layout", ""))
    if chosen is None:
        nearest = "; ".join(f"{prediction.layout}: {prediction.why}" for prediction in predictions)
        raise AgreedError(
            f"the model fits the ranks' memory in no layout ({nearest}); start more ranks, or use "
            "a smaller model or an optimizer with less state; see docs/large-models.md"
        )
    text = f"layout {chosen.layout}: the fastest that fits (--layout sets another)"
    print_rank_0(world, config.word(text))
    if chosen.layout == SHARD:
        return ShardLayout.find(config, setup, world)
    if chosen.layout == PIPELINE:
        takes_alike = config.balance == "off"
        return PipelineLayout.find(config, setup, world) if takes_alike else PipelineLayout(facts)
    if chosen.layout == EXPERTS and expert_facts is not None:
        from kaitian_mpi.train.layouts.experts.experts_layout import ExpertsLayout

        takes_alike = config.balance == "off"
        return (
            ExpertsLayout.find(config, setup, world) if takes_alike else ExpertsLayout(expert_facts)
        )
    return ReplicateLayout()


def measure_layouts(
    config: TrainingConfig, setup: Setup, world: World
) -> tuple[LayoutJob, PipelineFacts, ExpertFacts | None]:
    """Measure what the layouts are compared by; return it with the facts of layers and experts.

    Collective.

    Raises:
        LayerTooLargeError: a rank has too little memory to time it.
        AgreedError: the model cannot be timed.
    """
    model, min_batch = setup.task.model, min_batch_by_layers(setup.task.model)
    refused = refused_layouts(config, setup.task)
    facts = None
    if PIPELINE not in refused:
        try:
            facts = find_facts(config, setup, world)
        except LayerTooLargeError:  # then so is the whole
            raise
        except AgreedError as error:  # another layout may do
            refused[PIPELINE] = short_reason(error)
    facts = facts or find_facts(config, setup, world, is_whole=True)
    with agree_on_errors(world.comm):
        optimizers = setup.task.make_optimizers(model)
    buckets = gradient_buckets(model)
    # What is allocated for it stays with the process.
    memory = min(rank.memory_bytes for rank in facts.by_place.values())
    most = max(1 << 16, min(_LARGEST, int(_PART_OF_MEMORY * memory)))
    scatter, gather = measure_exchange(world, most)
    needs, _ = shard_needs(config, model, optimizers)
    chain = facts.job(config, world, min_batch)
    whole = whole_layer(model, optimizers, facts.layers)
    expert_facts = experts = None
    if find_mixtures(model) and EXPERTS not in refused:
        expert_facts = find_expert_facts(config, setup, world)
        experts = _expert_job(config, world, expert_facts, chain, whole)
    job = LayoutJob(
        chain,
        whole,
        tuple(needs[: 1 if any(map(is_compiled, model.modules())) else 2]),
        allreduce_cost=_measure_allreduce(config, world, [min(most, sum(buckets))]),
        scatter_cost=scatter,
        gather_cost=gather,
        on_host=any(info.is_on_host for info in world.infos),
        has_mirrors=config.mirrors and ulfm.is_enabled(),
        experts=experts,
        refused=refused,
    )
    return job, facts, expert_facts


def _expert_job(
    config: TrainingConfig, world: World, facts: ExpertFacts, chain: PipelineJob, whole: Layer
) -> ExpertsJob:
    """Return what experts are planned from, by the time and memory of the whole model."""
    experts = facts.experts
    weights = whole.weight_bytes - sum(expert.weight_bytes for expert in experts)
    state = whole.state_bytes - sum(each.trained_bytes + each.state_bytes for each in experts)
    trained = whole.trained_bytes - sum(expert.trained_bytes for expert in experts)
    costs, ranks = [], []
    for info, rank in zip(world.infos, chain.ranks, strict=True):
        times = facts.by_place[info.place]
        pairs = zip(times.token_sec, facts.tokens, strict=True)
        fixed, sample = sum(rank.fixed_sec), sum(rank.sample_sec)
        alpha = max(_LEAST_DENSE * fixed, fixed - sum(times.fixed_sec))
        beta = max(_LEAST_DENSE * sample, sample - sum(sec * tokens for sec, tokens in pairs))
        costs.append(RankCost(alpha, beta))
        # On a host, also the copy that is benchmarked.
        base = rank.base_bytes + weights * (1 + rank.is_on_host) + state
        base += trained * rank.steps_at_once
        free = rank.memory_bytes - base
        ranks.append(replace(times, base_bytes=base, free_bytes=max(0.0, free)))
    base_plan = Plan([config.global_batch_size], [1.0], costs, None, chain.min_batch)
    places = [info.place for info in world.infos]
    facts = replace(facts, by_place=dict(zip(places, ranks, strict=True)))
    return replace(facts.job(config, world, base_plan), batch_sizes=())


def _find_without_times(
    config: TrainingConfig, setup: Setup, world: World, error: LayerTooLargeError
) -> Layout:
    """Return the layout for a model of which a layer fits no rank so that it can be timed.

    That is experts if these fit, as fewer bytes travel than in shard; else shard. Collective.

    Raises:
        AgreedError: shard is not possible either.
    """
    why, advice = str(error).split("; ", 1)
    refused = refused_layouts(config, setup.task)
    whys = dict.fromkeys((REPLICATE, PIPELINE), why)
    whys |= {SHARD: refused.get(SHARD, "not timed")}
    layout: Layout | None = None
    if find_mixtures(setup.task.model):
        layout = None if EXPERTS in refused else _experts_if_they_fit(config, setup, world)
        whys[EXPERTS] = "not timed" if layout else refused.get(EXPERTS, "does not fit the ranks")
    if layout is None and SHARD in refused:
        raise AgreedError(f"{why}, and layout shard cannot divide it: {refused[SHARD]}; {advice}")
    name = EXPERTS if layout else SHARD
    predictions = [asdict(Prediction(layout, why=reason)) for layout, reason in whys.items()]
    setup.folder.write(FILE, {"layouts": predictions, "chosen": name})
    print_rank_0(world, f"layout {name}: others are not possible, or slower ({why})")
    return layout or ShardLayout.find(config, setup, world)


def _experts_if_they_fit(config: TrainingConfig, setup: Setup, world: World) -> Layout | None:
    """Return layout experts, or None if the ranks have too little memory for it. Collective."""
    from kaitian_mpi.train.layouts.experts.experts_layout import ExpertsLayout

    alike = {
        info.place: replace(profile_unmeasured(config, info), cost=_ALIKE) for info in world.infos
    }
    profiles = Profiles(alike, min_batch_by_layers(setup.task.model))
    try:
        layout = ExpertsLayout.find(config, setup, world)
        layout.facts.plan(config, world, profiles)
    except AgreedError:
        return None
    return layout


def whole_layer(
    model: nn.Module, optimizers: Sequence[Optimizer], layers: Sequence[Layer]
) -> Layer:
    """Return the model's activation memory, from that of its layers."""
    kept = sum(layer.kept_bytes for layer in layers)
    casts = sum(layer.cast_bytes for layer in layers)
    temporary = max(layer.temporary_bytes for layer in layers)
    (whole,) = layers_of([model], optimizers, [LayerBytes(kept, casts, temporary)])
    return whole


def refused_layouts(config: TrainingConfig, task: Task) -> dict[str, str]:
    """Return why the settings and the task rule layouts out."""
    refused = {}
    mixtures = find_mixtures(task.model)
    for layout in (SHARD, PIPELINE, *([EXPERTS] if mixtures else [])):
        try:
            config.check_layout(layout)
            check_parts(task, layout)
            if layout == EXPERTS:
                check_experts(task.model, mixtures)
        except UserError as error:
            refused[layout] = short_reason(error)
    return refused


def short_reason(error: UserError) -> str:
    """Return a message's fault, without its advice."""
    text = re.sub("^(ranks? [^:]*: )?(--layout [a-z]+: |Task: )?", "", str(error))
    return re.split("[;:] ", text, maxsplit=1)[0]


def _measure_allreduce(config: TrainingConfig, world: World, buckets: list[int]) -> AllreduceCost:
    group, sizes = cast("KaitianProcessGroup", dist.group.WORLD), [size // 4 for size in buckets]
    choose_algorithm(group, config.allreduce, sizes, world.device, world.relay.wire)
    return measure_allreduce(config.allreduce, world, range(world.size), buckets)


def measure_exchange(world: World, most: int) -> tuple[AllreduceCost, AllreduceCost]:
    """Return the cost of a sum in parts, and of bringing all parts to all ranks. Collective.

    It is measured with up to `most` bytes, by what equal owners of a parameter call.
    """
    if world.size == 1:
        return FREE, FREE
    has_library = uses_library(None)

    def exchange(start: Callable[..., Any], *tensors: torch.Tensor) -> None:
        start(*tensors, dist.group.WORLD).wait()
        world.synchronize()  # a library's work is done once it is queued

    sizes, works = (most // 16, most), dict[tuple[str, int], Any]()
    for size in sizes:
        rows = max(1, size // 4 // world.size)
        parameter = nn.Parameter(torch.zeros(rows * world.size, device=world.device))
        parts = [Part(0, rank * rows, (rank + 1) * rows, rank) for rank in range(world.size)]
        bucket = ShardBucket({0: parameter}, parts, world.size, world.rank, pads=has_library)
        whole = bucket.values(BufferPool(0))
        works["scatter", size] = partial(exchange, bucket.start_sum, bucket.padded, whole)
        works["gather", size] = partial(exchange, bucket.start_gather, whole)
    seconds = time_in_rounds(world.comm, works, _ROUNDS, _MAX_SEC)
    costs = []
    for name in ("scatter", "gather"):
        line = fit(sizes, [seconds[name, size] for size in sizes])
        costs.append(AllreduceCost(line.alpha_sec, line.beta_sec))
    return costs[0], costs[1]
