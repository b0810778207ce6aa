"""Each rank's memory in each layout, by purpose, as the comparison of layouts counts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.expert_plan import place_experts
from kaitian_mpi.balance.layouts import (
    EXPERTS,
    PIPELINE,
    REPLICATE,
    SHARD,
    LayoutJob,
    divide_shard,
)
from kaitian_mpi.balance.pipeline_cost import stage_bytes
from kaitian_mpi.balance.pipeline_plan import plan_pipeline
from kaitian_mpi.errors import UserError


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank's memory at the most, by what they are for."""

    parameters: float
    """Parameters and buffers; on a host, also the copy of them that the benchmark trains."""
    gradients: float
    state: float
    """Of the optimizer."""
    activations: float
    """Of the samples that it computes at once, with temporary tensors."""
    other: float
    """The process itself, and buffers of the layout."""
    stepping: float
    """Temporary tensors of the optimizer, while there are no activations."""
    samples: int
    """The samples that it computes at once; 0 if it computes none."""
    limit: float
    """The bytes that it may use."""

    @property
    def total(self) -> float:
        """The most that it uses at once."""
        held = self.parameters + self.gradients + self.state + self.other
        return held + max(self.activations, self.stepping)

    @property
    def fits(self) -> bool:
        """Whether that is what it may use; a fraction of a byte may be rounding."""
        return self.total < self.limit + 1


@dataclass(frozen=True)
class LayoutMemory:
    """The memory of all ranks in a layout."""

    layout: str
    ranks: tuple[RankMemory, ...] = ()
    """Empty if it is not known."""
    why: str = ""
    """The reason if it is impossible; otherwise a remark, or nothing."""

    @property
    def fits(self) -> bool:
        """Whether the layout fits the memory of every rank."""
        return bool(self.ranks) and all(rank.fits for rank in self.ranks)


def layout_memory(job: LayoutJob, layout: str) -> LayoutMemory:
    """Return what the ranks' memory is for in a layout, with the largest micro-batches that fit.

    The ranks' shares of the global batch are equal. If not even the smallest micro-batch fits, it
    is that one's.
    """
    if layout in job.refused:
        return LayoutMemory(layout, why=job.refused[layout])
    by_layout: dict[str, Callable[[LayoutJob], LayoutMemory]]
    by_layout = {REPLICATE: _replicate, SHARD: _shard, PIPELINE: _pipeline, EXPERTS: _experts}
    return by_layout[layout](job)


def _replicate(job: LayoutJob) -> LayoutMemory:
    whole = job.whole
    ranks = len(job.chain.ranks)
    return LayoutMemory(
        REPLICATE,
        _with_samples(
            job,
            parameters=whole.weight_bytes * job.copies,
            gradients=np.full(ranks, float(whole.trained_bytes)),
            state=np.full(ranks, float(whole.state_bytes - whole.trained_bytes)),
            other=job.base_bytes + whole.cast_bytes,
            stepping=job.optimizer_bytes(np.ones(ranks)),
        ),
    )


def _shard(job: LayoutJob) -> LayoutMemory:
    whole = job.whole
    need, fixed, fractions, why = divide_shard(job)
    trained = fractions * whole.trained_bytes
    whole_bytes = whole.weight_bytes - need.freed
    ranks = _with_samples(
        job,
        parameters=whole_bytes + fractions * need.freed,
        gradients=trained,
        state=fractions * (need.owned - need.freed) - trained,
        other=fixed - whole_bytes,
        stepping=job.optimizer_bytes(fractions),
    )
    return LayoutMemory(SHARD, ranks, why or "parameters sharded, too" * bool(need.freed))


def _pipeline(job: LayoutJob) -> LayoutMemory:
    chain = job.chain
    plan = plan_pipeline(chain)
    if plan is None:
        return LayoutMemory(PIPELINE, why="no division of the layers fits the ranks' memory")
    count = math.ceil(chain.global_batch / plan.micro_batch)
    stages = stage_bytes(chain, plan.stages, count, chain.global_batch / count, plan.ahead)
    ranks = []
    for rank, facts in enumerate(chain.ranks):
        if rank not in stages:
            idle = RankMemory(facts.start_bytes - facts.base_bytes, 0, 0, 0, facts.base_bytes, 0, 0,
                              facts.memory_bytes)  # fmt: skip
            ranks.append(idle)
            continue
        stage, sizes = stages[rank]
        layers = chain.layers[stage.begin : stage.end]
        gradients = sum(layer.trained_bytes for layer in layers)
        ranks.append(
            RankMemory(
                parameters=sum(layer.weight_bytes for layer in layers),
                gradients=gradients,
                state=sum(layer.state_bytes for layer in layers) - gradients,
                activations=sizes.computing,
                other=facts.base_bytes + sizes.buffer,
                stepping=sizes.stepping,
                samples=plan.micro_batch,
                limit=facts.memory_bytes,
            )
        )
    counted = f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    return LayoutMemory(PIPELINE, tuple(ranks), counted)


def _experts(job: LayoutJob) -> LayoutMemory:
    experts = job.experts
    whole = job.whole
    assert experts is not None
    try:
        placement = place_experts(experts)
    except UserError:
        return LayoutMemory(EXPERTS, why="no division of the experts fits the ranks' memory")
    columns = [
        [expert.weight_bytes for expert in experts.experts],
        [expert.trained_bytes for expert in experts.experts],
        [expert.state_bytes for expert in experts.experts],
    ]
    totals = whole.weight_bytes, whole.trained_bytes, whole.state_bytes - whole.trained_bytes
    dense = [max(0, total - sum(column)) for total, column in zip(totals, columns, strict=True)]
    ranks = []
    for rank, facts in enumerate(experts.ranks):
        held = placement.experts_of(rank)
        held += [number for number, mirror in enumerate(placement.mirrors) if mirror == rank]
        weights, gradients, state = (
            size + sum(column[number] for number in held)
            for size, column in zip(dense, columns, strict=True)
        )
        held_bytes = sum(experts.experts[number].held_bytes for number in held)
        ranks.append(
            RankMemory(
                parameters=weights,
                gradients=gradients,
                state=state,
                activations=placement.bytes_by_rank[rank] - held_bytes,
                other=max(0.0, facts.base_bytes - sum(dense)),
                stepping=0.0,
                samples=math.ceil(placement.batch_sizes[rank] / placement.rounds),
                limit=float(job.memory_bytes[rank]),
            )
        )
    counts = [len(placement.experts_of(rank)) for rank in range(len(ranks))]
    return LayoutMemory(EXPERTS, tuple(ranks), f"{min(counts)} to {max(counts)} experts on a rank")


def _with_samples(
    job: LayoutJob,
    *,
    parameters: np.ndarray,
    gradients: np.ndarray,
    state: np.ndarray,
    other: np.ndarray,
    stepping: np.ndarray,
) -> tuple[RankMemory, ...]:
    """Return each rank's memory, with the most samples at once that its share and memory permit."""
    chain = job.chain
    share = math.ceil(chain.global_batch / len(chain.ranks))
    most = max(chain.min_batch, min(share, chain.micro_batch or share))
    free = job.memory_bytes - (parameters + gradients + state + other)
    fitting = np.floor(free / max(job.sample_bytes, 1.0))
    samples = np.clip(fitting, chain.min_batch, most)
    activations = samples * job.sample_bytes
    limits = job.memory_bytes
    return tuple(
        RankMemory(
            parameters=float(parameters[rank]),
            gradients=float(gradients[rank]),
            state=float(state[rank]),
            activations=float(activations[rank]),
            other=float(other[rank]),
            stepping=float(stepping[rank]),
            samples=int(samples[rank]),
            limit=float(limits[rank]),
        )
        for rank in range(len(chain.ranks))
    )
