"""The cost of a pipeline's step: its seconds, and each rank's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add, sub
from typing import Any, NamedTuple

from kaitian_mpi.balance.pipeline import (
    Hop,
    PipelinePlan,
    Stage,
    max_in_flight,
    simulate,
    windows,
)

_LONG_SIMULATION = 20_000  # actions; a longer one is replaced by a formula
_MANY_RANKS = 64
_MUCH_WORK = 500_000  # ranks * layers**2
TRANSIT = 4  # activations of a micro-batch that are in transit while it is computed
TEMPORARIES = 2  # tensors of a parameter's size that an optimizer needs to step it
BUCKET_BYTES = 16 << 20
# The work of a rank's step in each layout beyond computing and its optimizer: torch calls of the
# loop, torch calls per parameter, and passes over all gradients. Gradients are copied to buffers
# and checked; in shard, the new values are copied back, too.
HANDLING = {"replicate": (700, 5, 1.5), "shard": (1500, 24, 3.0), "pipeline": (1000, 2, 0.5)}


@dataclass(frozen=True)
class Layer:
    """A layer's memory and output, the same on every rank."""

    weight_bytes: int
    """Bytes of its parameters."""
    state_bytes: int
    """Bytes of their gradients and optimizer state."""
    kept_bytes: float
    """Bytes of activations per sample, kept from forward to backward."""
    output_bytes: float
    """Bytes of its output per sample."""
    largest_bytes: int = 0
    """Bytes of its largest parameter."""
    trained_bytes: int = 0
    """Bytes of the parameters that an optimizer steps."""
    trained: int = 0
    """The number of parameters that an optimizer steps."""
    cast_bytes: float = 0.0
    """Bytes of autocast's copies of its weights, during a step."""
    temporary_bytes: float = 0.0
    """Bytes per sample that it allocates at most besides, during its forward or backward."""


@dataclass(frozen=True)
class LayerFacts:
    """A rank's measured speed and memory."""

    kind: str
    memory_bytes: float
    """The most bytes that it may use."""
    fixed_sec: tuple[float, ...]
    """By layer, seconds of forward and backward per micro-batch."""
    sample_sec: tuple[float, ...]
    """By layer, seconds of forward and backward per sample."""
    forward: float = 1 / 3
    """The forward's fraction of that time."""
    update_sec: float = 0.0
    """Seconds of the optimizer per parameter."""
    update_sec_per_byte: float = 0.0
    """Seconds of the optimizer per byte of the parameters."""
    call_sec: float = 0.0
    """Seconds to copy a tensor, however small."""
    copy_sec_per_byte: float = 0.0
    """Seconds per byte to copy memory that is not cached."""
    base_bytes: float = 0.0
    """Bytes that it uses beyond parameters, state and activations."""
    start_bytes: float = 0.0
    """Bytes that it uses before the layers are divided."""
    steps_at_once: bool = False
    """Whether its optimizer steps all parameters at once, with temporary memory for each."""
    node: int = 0
    """The number of its host. Ranks of one host share its link, so they take turns to send."""
    is_on_host: bool = False
    """Whether it computes on its host's CPU."""

    def scaled(self, factor: float) -> LayerFacts:
        """Return the facts of a rank that takes `factor` times as long."""
        return replace(
            self,
            fixed_sec=tuple(factor * seconds for seconds in self.fixed_sec),
            sample_sec=tuple(factor * seconds for seconds in self.sample_sec),
            update_sec_per_byte=factor * self.update_sec_per_byte,
        )

    def update_seconds(self, count: float, size: float) -> float:
        """Return the optimizer's seconds to step `count` parameters of `size` bytes in total."""
        return count * self.update_sec + size * self.update_sec_per_byte

    def handling_seconds(self, layout: str, count: int, size: int) -> float:
        """Return the seconds of the work in `HANDLING`, for `count` parameters of `size` bytes."""
        loop_calls, calls_per_parameter, passes = HANDLING[layout]
        calls = loop_calls + calls_per_parameter * count
        return calls * self.call_sec + passes * size * self.copy_sec_per_byte


@dataclass(frozen=True)
class PipelineJob:
    """The layers, ranks and links that a pipeline is planned for."""

    layers: tuple[Layer, ...]
    ranks: tuple[LayerFacts, ...]
    global_batch: int
    min_batch: int = 1
    micro_batch: int = 0
    """The largest number of samples in a micro-batch; 0: the plan chooses it."""
    links: Mapping[str, Hop] = field(default_factory=dict)
    """By two kinds in alphabetical order: a message's latency, and its busy seconds per byte."""

    def hop(self, one: str, other: str, size: float) -> Hop:
        """Return the time of a message of `size` bytes between two kinds of ranks."""
        link = self.links.get(f"{min(one, other)} {max(one, other)}", Hop(0.0, 0.0))
        return Hop(link.latency_sec, size * link.busy_sec)

    @cached_property
    def sums(self) -> list[tuple[list[float], list[float]]]:
        """By rank, cumulative seconds before each layer: per micro-batch, and per sample."""
        sums: list[tuple[list[float], list[float]]] = []
        sums_by_facts: dict[Any, tuple[list[float], list[float]]] = {}  # most ranks are alike
        for facts in self.ranks:
            key = (facts.fixed_sec, facts.sample_sec, facts.copy_sec_per_byte)
            if key not in sums_by_facts:
                # All micro-batches of a step but the first add to existing gradients.
                add_sec = [layer.trained_bytes * facts.copy_sec_per_byte for layer in self.layers]
                first_sec = [seconds / self.global_batch for seconds in add_sec]
                fixed = itertools.accumulate(map(add, facts.fixed_sec, add_sec), initial=0.0)
                sample = itertools.accumulate(map(sub, facts.sample_sec, first_sec), initial=0.0)
                sums_by_facts[key] = (list(fixed), list(sample))
            sums.append(sums_by_facts[key])
        return sums

    def seconds(self, rank: int, begin: int, end: int, samples: float) -> float:
        """Return a rank's seconds for a micro-batch through some layers."""
        fixed, sample = self.sums[rank]
        return fixed[end] - fixed[begin] + samples * (sample[end] - sample[begin])

    def links_of(self, stage: Stage) -> int:
        """Return the number of hosts of a stage: each has a link of its own to other stages."""
        return len({self.ranks[rank].node for rank in stage.ranks})

    @property
    def is_large(self) -> bool:
        """Whether there are too many ranks and layers to compare all plans."""
        ranks = len(self.ranks)
        layers = len(self.layers)
        return ranks > _MANY_RANKS or ranks * layers**2 > _MUCH_WORK


def predict(
    job: PipelineJob, stages: Sequence[Stage], micro_batch: int, ahead: int
) -> PipelinePlan:
    """Return a plan with the seconds of its step and the peak memory of each rank."""
    count = math.ceil(job.global_batch / micro_batch)
    samples = job.global_batch / count
    timed = tuple(_with_seconds(job, stage, samples) for stage in stages)
    hops = []
    for stage, following in itertools.pairwise(timed):
        links = min(job.links_of(stage), job.links_of(following))
        size = samples * job.layers[stage.end - 1].output_bytes / links
        kinds = [job.ranks[end.ranks[0]].kind for end in (stage, following)]
        hops.append(job.hop(kinds[0], kinds[1], size))
    if 2 * count * len(timed) <= _LONG_SIMULATION:
        forward = sum(job.ranks[stage.ranks[0]].forward for stage in timed) / len(timed)
        step = simulate(timed, hops, count, ahead, forward)
    else:
        step = _formula_sec(timed, hops, count)
    step += max(_update_sec(job, stage) for stage in timed)
    memory = _memory(job, timed, count, samples, ahead)
    return PipelinePlan(timed, micro_batch, ahead, step, memory)


def fits(job: PipelineJob, plan: PipelinePlan) -> bool:
    """Return whether each rank's memory suffices."""
    pairs = zip(job.ranks, plan.bytes_by_rank, strict=True)
    return all(size <= facts.memory_bytes for facts, size in pairs)


def _with_seconds(job: PipelineJob, stage: Stage, samples: float) -> Stage:
    seconds = [job.seconds(rank, stage.begin, stage.end, samples) for rank in stage.ranks]
    return replace(stage, seconds=tuple(seconds))


def _formula_sec(stages: Sequence[Stage], hops: Sequence[Hop], count: int) -> float:
    rates = [sum(1 / seconds for seconds in stage.seconds) for stage in stages]
    total = sum(len(stage.seconds) / rate for stage, rate in zip(stages, rates, strict=True))
    longest = max([*(1 / rate for rate in rates), *(hop.busy_sec for hop in hops)])
    return total + sum(2 * sum(hop) for hop in hops) + (count - 1) * longest


def _update_sec(job: PipelineJob, stage: Stage) -> float:
    """Return the seconds of a stage's allreduce, gradient check and optimizer step."""
    layers = job.layers[stage.begin : stage.end]
    count = sum(layer.trained for layer in layers)
    size = sum(layer.trained_bytes for layer in layers)
    slowest_sec = max(
        facts.update_seconds(count, size) + facts.handling_seconds("pipeline", count, size)
        for facts in (job.ranks[rank] for rank in stage.ranks)
    )
    ranks = len(stage.ranks)
    if ranks == 1:
        return slowest_sec
    kind = job.ranks[stage.ranks[0]].kind
    allreduce = job.hop(kind, kind, 2 * size * (ranks - 1) / ranks)
    return slowest_sec + sum(allreduce)


class StageBytes(NamedTuple):
    """The bytes of a rank of a stage, apart from what it uses at startup."""

    buffer: int
    """For the sums of the stage's ranks."""
    computing: float
    """The peak of activations and temporary tensors while it computes."""
    stepping: float
    """The peak of temporary tensors while its optimizer steps."""


def stage_bytes(
    job: PipelineJob, stages: Sequence[Stage], count: int, samples: float, ahead: int
) -> dict[int, tuple[Stage, StageBytes]]:
    """Return the stage of each rank that has one, and its bytes.

    Args:
        job: the layers and ranks.
        stages: in the order of the layers.
        count: the number of micro-batches of a step.
        samples: the samples of a micro-batch.
        ahead: see `windows`.
    """
    by_rank: dict[int, tuple[Stage, StageBytes]] = {}
    for stage, window in zip(stages, windows(stages, ahead), strict=True):
        layers = job.layers[stage.begin : stage.end]
        replicas = len(stage.ranks)
        largest = max(layer.largest_bytes for layer in layers)
        trained = sum(layer.trained_bytes for layer in layers)
        casts = sum(layer.cast_bytes for layer in layers)
        temporary = max(layer.temporary_bytes for layer in layers)
        sample_bytes = samples * sum(layer.kept_bytes for layer in layers)
        ends = job.layers[max(0, stage.begin - 1)].output_bytes + layers[-1].output_bytes
        share = math.ceil(min(count, window) / replicas)
        micro_batches: dict[int, list[int]] = {rank: [] for rank in stage.ranks}
        if not job.is_large:
            for number, rank in enumerate(stage.micro_batch_ranks(count)[: 4 * window]):
                micro_batches[rank].append(number)
        buffer = BUCKET_BYTES * (replicas > 1)
        for rank in stage.ranks:
            in_flight = share if job.is_large else max_in_flight(micro_batches[rank], window)
            computing = in_flight * sample_bytes + TRANSIT * samples * ends + largest + casts
            computing += samples * temporary
            stepping = trained if job.ranks[rank].steps_at_once else TEMPORARIES * largest
            by_rank[rank] = stage, StageBytes(buffer, computing, stepping)
    return by_rank


def _memory(
    job: PipelineJob, stages: Sequence[Stage], count: int, samples: float, ahead: int
) -> tuple[int, ...]:
    """Return the peak memory of each rank, in bytes."""
    by_rank = [int(facts.start_bytes) for facts in job.ranks]
    for rank, (stage, sizes) in stage_bytes(job, stages, count, samples, ahead).items():
        layers = job.layers[stage.begin : stage.end]
        held = sizes.buffer + sum(layer.weight_bytes + layer.state_bytes for layer in layers)
        peak = job.ranks[rank].base_bytes + held + max(sizes.computing, sizes.stepping)
        by_rank[rank] = max(by_rank[rank], int(peak))
    return tuple(by_rank)
