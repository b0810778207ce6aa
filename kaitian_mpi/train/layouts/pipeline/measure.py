"""Measures what a model's layers take on each rank, and plans the pipeline from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from kaitian_mpi.balance.pipeline import Hop, PipelinePlan
from kaitian_mpi.balance.pipeline_cost import Layer, LayerFacts, PipelineJob
from kaitian_mpi.balance.pipeline_plan import plan_pipeline
from kaitian_mpi.balance.records import rebuild
from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, LayerTooLargeError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values, join_errors
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.layouts.divided_step import check_parts
from kaitian_mpi.train.layouts.links import measure_links
from kaitian_mpi.train.layouts.pipeline.chain import chain_of
from kaitian_mpi.train.layouts.pipeline.chain_check import check_chain
from kaitian_mpi.train.layouts.pipeline.layer_timer import LayerTimer
from kaitian_mpi.train.measure.plan import Plan, min_batch_by_layers
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import aside

_UNMEASURED_FIXED = 2.0  # a micro-batch's own time, in that of a sample


@dataclass(frozen=True, kw_only=True)
class StagesPlan(Plan):
    """The stages of the ranks; their batch sizes are what those of the first stage read."""

    pipeline: PipelinePlan

    def describe(self, infos: Sequence[RankInfo]) -> dict[str, Any]:
        ranks = [info.world_rank for info in infos]
        stages = [
            {"layers": [s.begin + 1, s.end], "ranks": [ranks[rank] for rank in s.ranks]}
            for s in self.pipeline.stages
        ]
        return {
            "pipeline": {
                "stages": stages,
                "micro_batch_size": self.pipeline.micro_batch,
                "predicted_step_sec": self.pipeline.step_sec,
            }
        }


@dataclass(frozen=True)
class PipelineFacts:
    """The measurements from which stages are planned; the same on every rank."""

    layers: tuple[Layer, ...]
    by_place: Mapping[str, LayerFacts]
    links: Mapping[str, Hop]

    def plan(self, config: TrainingConfig, world: World, min_batch: int) -> StagesPlan:
        """Plan the stages of these ranks. Collective."""
        planned = None
        if world.rank == 0:  # others may round otherwise
            job = self.job(config, world, min_batch)
            plan = plan_pipeline(job)
            planned = asdict(plan) if plan is not None else self._too_large(job)
        planned = gather_values(world.comm, planned)[0]
        if isinstance(planned, str):
            raise AgreedError(planned)
        pipeline: PipelinePlan = rebuild(PipelinePlan, planned)
        sizes = split_micro_batches(config.global_batch_size, pipeline.micro_batch, min_batch)
        shares = pipeline.first_samples(sizes, world.size)
        return StagesPlan(
            batch_sizes=shares,
            scores=[1.0] * world.size,
            costs=None,
            micro_batch_size=pipeline.micro_batch,
            min_batch=min_batch,
            pipeline=pipeline,
        )

    def scaled(self, factors: Mapping[str, float]) -> PipelineFacts:
        """Return the facts of ranks that take so many times as long, by place."""
        scaled = {place: self.by_place[place].scaled(factor) for place, factor in factors.items()}
        return replace(self, by_place={**self.by_place, **scaled})

    def job(self, config: TrainingConfig, world: World, min_batch: int) -> PipelineJob:
        """Return the measurements from which the stages of these ranks are planned."""
        ranks = tuple(self.by_place[info.place] for info in world.infos)
        sizes = config.global_batch_size, min_batch, config.micro_batch_size
        return PipelineJob(self.layers, ranks, *sizes, self.links)

    def _too_large(self, job: PipelineJob) -> str:
        needed = sum(layer.weight_bytes + layer.state_bytes for layer in self.layers)
        free = (max(0.0, facts.memory_bytes - facts.base_bytes) for facts in job.ranks)
        available = ", ".join(f"{free_bytes / 1e6:.0f}" for free_bytes in free)
        return (
            f"--layout pipeline: the layers, their gradients and optimizer state take "
            f"{needed / 1e6:.0f} MB without activations, and the ranks have {available} MB of free "
            "memory; start more ranks, divide the model into smaller layers, or use a smaller model"
        )


def find_facts(
    config: TrainingConfig,
    setup: Setup,
    world: World,
    is_whole: bool = False,
    takes_alike: bool = False,
) -> PipelineFacts:
    """Measure each layer on each rank, one at a time. Collective.

    The model stays on the host, and is not changed. If `is_whole`, it is the only layer. If it
    `takes_alike`, the ranks count as equally fast, and a layer by its size: nothing is timed.

    Raises:
        LayerTooLargeError: a rank has too little memory for a layer.
        AgreedError: the task cannot be trained so.
    """
    task = setup.task
    min_batch = min_batch_by_layers(task.model)
    with agree_on_errors(world.comm):
        if task.loss is None:
            raise UserError(
                "--layout pipeline and auto require Task(loss=...), which is timed; give --layout "
                "replicate or shard"
            )
        chain = None if is_whole else _checked_chain(setup, world, min_batch)
        optimizers = task.make_optimizers(task.model)
    sleeping_barrier(world.comm)
    too_large = ""
    with agree_on_errors(world.comm), aside(world.device):
        timer = LayerTimer(config, setup, chain, world, min_batch, not takes_alike)
        try:
            facts, layers = timer.measure(optimizers)
        except LayerTooLargeError as error:
            too_large = str(error)
    if any(faults := gather_values(world.comm, too_large)):
        raise LayerTooLargeError(join_errors(faults))
    enter_phase("comparing the benchmarks", waits=True, limited=False)
    rank_facts = asdict(facts), [asdict(layer) for layer in layers]
    gathered = gather_values(world.comm, rank_facts)
    by_place = {
        info.place: rebuild(LayerFacts, content)
        for info, (content, _) in zip(world.infos, gathered, strict=True)
    }
    agreed_layers = _together([rebuild(tuple[Layer, ...], layers) for _, layers in gathered])
    if takes_alike:
        by_place = {place: _unmeasured(timed, agreed_layers) for place, timed in by_place.items()}
    return PipelineFacts(agreed_layers, by_place, measure_links(world))


def _checked_chain(setup: Setup, world: World, min_batch: int) -> list[nn.Module]:
    """Return the task's layers; rank 0 checks with two batches that they compute the model.

    Not collective.
    """
    task = setup.task
    check_parts(task, "pipeline")
    chain = chain_of(task)
    if world.rank == 0:
        first = range(min(len(setup.train), 2 * min_batch))
        halves = first[:min_batch], first[min_batch:]
        batches = [setup.train[[*half]] for half in halves if len(half) == min_batch]
        with aside(torch.device("cpu")):
            check_chain(task, chain, batches)
    return chain


def _together(by_rank: Sequence[Sequence[Layer]]) -> tuple[Layer, ...]:
    """Return the layers as rank 0 has measured them, with the most that any has at once."""
    most = [max(layer.temporary_bytes for layer in rows) for rows in zip(*by_rank, strict=True)]
    pairs = zip(by_rank[0], most, strict=True)
    return tuple(replace(layer, temporary_bytes=size) for layer, size in pairs)


def _unmeasured(facts: LayerFacts, layers: Sequence[Layer]) -> LayerFacts:
    """Return facts as if each rank took the same, in proportion to a layer's parameters."""
    seconds = tuple(1e-9 * (layer.weight_bytes + layer.output_bytes + 1) for layer in layers)
    fixed = tuple(_UNMEASURED_FIXED * sec for sec in seconds)
    still = replace(facts, update_sec=0.0, update_sec_per_byte=0.0, call_sec=0.0)
    return replace(still, fixed_sec=fixed, sample_sec=seconds, forward=1 / 3, copy_sec_per_byte=0.0)
