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
from kaitian_mpi.train.layouts.shard.memory_budget import possible_needs
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
# An exchange is timed with at most so many bytes, and at most this part of a rank's memory.
_MAX_EXCHANGED_BYTES = 8 << 20
_PART_OF_MEMORY = 0.01
_ROUNDS = 6
_MAX_SEC = 1.0
_ALIKE = RankCost(0.0, 1e-6)  # of ranks whose rows are not timed
# The least part of a model's time outside of its experts: a difference of two measurements.
_LEAST_DENSE = 0.05


def choose_layout(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    """Return the fastest layout of those that fit the ranks' memory. Collective.

    Prints all layouts with their predicted steps and memory, and writes them to layouts.json.

    Raises:
        AgreedError: none fits.
    """
    try:
        job, facts, expert_facts = measure_layouts(config, setup, world)
    except LayerTooLargeError as error:
        return _find_without_times(config, setup, world, error)
    predictions = predict_layouts(job)
    # All ranks use those of rank 0, as others may round differently.
    rank_predictions = [asdict(prediction) for prediction in predictions]
    written = gather_values(world.comm, rank_predictions)[0]
    predictions = [Prediction(**prediction) for prediction in written]
    show_table(world, "layouts, as predicted", prediction_table(predictions), left=("layout", ""))
    layout: Layout | None = None
    while layout is None and (chosen := choose(predictions)) is not None:
        try:
            layout = _find_predicted(chosen.layout, config, setup, world, facts, expert_facts)
        except AgreedError as error:  # timing has left less memory than there was before
            why = f"does not fit after all: {short_reason(error)}"
            print_rank_0(world, config.word(f"layout {chosen.layout} {why}"))
            unfit = Prediction(chosen.layout, why=why)
            predictions = [unfit if p is chosen else p for p in predictions]
    name = layout.name if layout else None
    setup.folder.write(FILE, {"layouts": [asdict(p) for p in predictions], "chosen": name})
    if layout is None:
        reasons = "; ".join(f"{prediction.layout}: {prediction.why}" for prediction in predictions)
        raise AgreedError(
            f"the model fits the ranks' memory in no layout ({reasons}); start more ranks, or use "
            "a smaller model or an optimizer with less state; see docs/large-models.md"
        )
    text = f"layout {name}: the fastest that fits (--layout sets another)"
    print_rank_0(world, config.word(text))
    return layout


def _find_predicted(
    name: str,
    config: TrainingConfig,
    setup: Setup,
    world: World,
    facts: PipelineFacts,
    expert_facts: ExpertFacts | None,
) -> Layout:
    """Return the layout of a name, with what was measured to predict it. Collective.

    Raises:
        AgreedError: it does not fit.
    """
    # With --balance off a layout takes all ranks as alike, so it does not use their measured speed.
    uses_speeds = config.balance != "off"
    if name == SHARD:
        return ShardLayout.find(config, setup, world)
    if name == PIPELINE:
        return PipelineLayout(facts) if uses_speeds else PipelineLayout.find(config, setup, world)
    if name == EXPERTS and expert_facts is not None:
        from kaitian_mpi.train.layouts.experts.experts_layout import ExpertsLayout

        if uses_speeds:
            return ExpertsLayout(expert_facts)
        return ExpertsLayout.find(config, setup, world)
    return ReplicateLayout()


def measure_layouts(
    config: TrainingConfig, setup: Setup, world: World
) -> tuple[LayoutJob, PipelineFacts, ExpertFacts | None]:
    """Measure the job for all layouts. Collective.

    Returns:
        The job, the facts of the model's layers, and those of its experts; None without experts.

    Raises:
        LayerTooLargeError: a rank has too little memory to time a layer.
        AgreedError: the model cannot be timed.
    """
    model = setup.task.model
    min_batch = min_batch_by_layers(model)
    refused = refused_layouts(config, setup.task)
    facts = None
    if PIPELINE not in refused:
        try:
            facts = find_facts(config, setup, world)
        except LayerTooLargeError:  # the whole model is too large as well
            raise
        except AgreedError as error:  # another layout may work
            refused[PIPELINE] = short_reason(error)
    facts = facts or find_facts(config, setup, world, is_whole=True)
    with agree_on_errors(world.comm):
        optimizers = setup.task.make_optimizers(model)
    buckets = gradient_buckets(model)
    # The process keeps the memory that the exchange allocates, so it is limited.
    memory = min(rank.memory_bytes for rank in facts.by_place.values())
    most_bytes = max(1 << 16, min(_MAX_EXCHANGED_BYTES, int(_PART_OF_MEMORY * memory)))
    scatter, gather = measure_exchange(world, most_bytes)
    chain = facts.job(config, world, min_batch)
    whole = whole_layer(model, optimizers, facts.layers)
    expert_facts = experts = None
    if find_mixtures(model) and EXPERTS not in refused:
        expert_facts = find_expert_facts(config, setup, world)
        experts = _expert_job(config, world, expert_facts, chain, whole)
    job = LayoutJob(
        chain,
        whole,
        possible_needs(config, model, optimizers),
        allreduce_cost=_measure_allreduce(config, world, [min(most_bytes, sum(buckets))]),
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
    """Return the job that experts are planned for.

    The time and memory of all that is not in experts is that of the whole model without theirs.
    """
    experts = facts.experts
    # Bytes outside of experts.
    weights = whole.weight_bytes - sum(expert.weight_bytes for expert in experts)
    trained = whole.trained_bytes - sum(expert.trained_bytes for expert in experts)
    state = whole.state_bytes
    state -= sum(expert.trained_bytes + expert.state_bytes for expert in experts)
    costs = []
    ranks = []
    for info, rank in zip(world.infos, chain.ranks, strict=True):
        times = facts.by_place[info.place]
        fixed_sec = sum(rank.fixed_sec)
        sample_sec = sum(rank.sample_sec)
        pairs = zip(times.token_sec, facts.tokens, strict=True)
        expert_sample_sec = sum(token_sec * tokens for token_sec, tokens in pairs)
        alpha = max(_LEAST_DENSE * fixed_sec, fixed_sec - sum(times.fixed_sec))
        beta = max(_LEAST_DENSE * sample_sec, sample_sec - expert_sample_sec)
        costs.append(RankCost(alpha, beta))
        base_bytes = rank.base_bytes + weights + state
        if rank.is_on_host:
            base_bytes += weights  # the copy that is benchmarked
        if rank.steps_at_once:
            base_bytes += trained
        free_bytes = max(0.0, rank.memory_bytes - base_bytes)
        ranks.append(replace(times, base_bytes=base_bytes, free_bytes=free_bytes))
    base_plan = Plan([config.global_batch_size], [1.0], costs, None, chain.min_batch)
    places = [info.place for info in world.infos]
    facts = replace(facts, by_place=dict(zip(places, ranks, strict=True)))
    return replace(facts.job(config, world, base_plan), batch_sizes=())


def _find_without_times(
    config: TrainingConfig, setup: Setup, world: World, error: LayerTooLargeError
) -> Layout:
    """Return the layout for a model of which a layer is too large for some rank to time it.

    That is experts if these fit, as fewer bytes travel than in shard; otherwise shard. Collective.

    Raises:
        AgreedError: shard is not possible either.
    """
    why, advice = str(error).split("; ", 1)
    refused = refused_layouts(config, setup.task)
    reasons = {REPLICATE: why, PIPELINE: why, SHARD: refused.get(SHARD, "not timed")}
    layout: Layout | None = None
    if find_mixtures(setup.task.model):
        if EXPERTS not in refused:
            layout = _experts_if_they_fit(config, setup, world)
        is_possible = layout is not None
        refusal = refused.get(EXPERTS, "does not fit the ranks")
        reasons[EXPERTS] = "not timed" if is_possible else refusal
    if layout is None and SHARD in refused:
        raise AgreedError(f"{why}, and layout shard cannot divide it: {refused[SHARD]}; {advice}")
    chosen = EXPERTS if layout else SHARD
    predictions = [asdict(Prediction(name, why=reason)) for name, reason in reasons.items()]
    setup.folder.write(FILE, {"layouts": predictions, "chosen": chosen})
    print_rank_0(world, f"layout {chosen}: others are not possible, or slower ({why})")
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
    """Return the whole model as one layer, with the activation memory of its layers."""
    kept_bytes = sum(layer.kept_bytes for layer in layers)
    cast_bytes = sum(layer.cast_bytes for layer in layers)
    temporary_bytes = max(layer.temporary_bytes for layer in layers)
    (whole,) = layers_of([model], optimizers, [LayerBytes(kept_bytes, cast_bytes, temporary_bytes)])
    return whole


def refused_layouts(config: TrainingConfig, task: Task) -> dict[str, str]:
    """Return the layouts that the settings or the task exclude, with the reasons."""
    refused = {}
    mixtures = find_mixtures(task.model)
    layouts = [SHARD, PIPELINE, EXPERTS] if mixtures else [SHARD, PIPELINE]
    for layout in layouts:
        try:
            config.check_layout(layout)
            check_parts(task, layout)
            if layout == EXPERTS:
                check_experts(task.model, mixtures)
        except UserError as error:
            refused[layout] = short_reason(error)
    return refused


def short_reason(error: UserError) -> str:
    """Return what an error's message says is wrong, without its beginning and its advice."""
    text = re.sub("^(ranks? [^:]*: )?(--layout [a-z]+: |Task: )?", "", str(error))
    return re.split("[;:] ", text, maxsplit=1)[0]


def _measure_allreduce(config: TrainingConfig, world: World, buckets: list[int]) -> AllreduceCost:
    """Choose the allreduce algorithm for buckets of so many bytes, and return its cost."""
    group = cast("KaitianProcessGroup", dist.group.WORLD)
    numels = [size // 4 for size in buckets]  # in float32
    choose_algorithm(group, config.allreduce, numels, world.device, world.communication.wire)
    return measure_allreduce(config.allreduce, world, range(world.size), buckets)


def measure_exchange(world: World, most_bytes: int) -> tuple[AllreduceCost, AllreduceCost]:
    """Return the costs of a reduce-scatter and of an all-gather between equal owners. Collective.

    They are measured with up to `most_bytes`, by the calls that layout shard makes.
    """
    if world.size == 1:
        return FREE, FREE
    has_library = uses_library(None)

    def exchange(start: Callable[..., Any], *tensors: torch.Tensor) -> None:
        start(*tensors, dist.group.WORLD).wait()
        world.synchronize()  # a library's work is done once it is queued

    sizes = (most_bytes // 16, most_bytes)
    works: dict[tuple[str, int], Any] = {}
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
