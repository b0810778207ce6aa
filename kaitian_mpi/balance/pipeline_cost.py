"""What a pipeline's step takes: its seconds, and each rank's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add, sub
from typing import Any

from kaitian_mpi.balance.pipeline import Hop, PipelinePlan, Stage, most_kept, simulate, windows

_LONG_SIMULATION = 20_000  # actions
_MANY_RANKS, _MUCH_WORK = 64, 500_000
TRANSIT = 4  # activations of a micro-batch that are sent or received while it is computed
TEMPORARIES = 2  # of a parameter's size, while an optimizer steps it
BUCKET_BYTES = 16 << 20
# What a rank does in a step of each layout besides computing and its optimizer: as many calls of
# torch as the loop takes the time of, and those by parameter; and passes over all gradients. These
# go to buffers, and are checked; in shard, the new values come back, too.
HANDLING = {"replicate": (700, 5, 1.5), "shard": (1500, 24, 3.0), "pipeline": (1000, 2, 0.5)}


@dataclass(frozen=True)
class Layer:
    """What a layer takes, the same on every rank."""

    weight_bytes: int
    """Of its parameters."""
    state_bytes: int
    """Of their gradients and of the optimizer's state."""
    kept_bytes: float
    """Kept of a sample from its forward to its backward."""
    output_bytes: float
    """What it returns for a sample."""
    largest_bytes: int = 0
    """Of its largest parameter."""
    trained_bytes: int = 0
    """Of the parameters that an optimizer steps."""
    trained: int = 0
    """The number of these."""
    cast_bytes: float = 0.0
    """Of the copies that autocast makes of its weights, while a step computes."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank takes for each layer, forward and backward."""

    kind: str
    memory_bytes: float
    """That it may use at most."""
    fixed_sec: tuple[float, ...]
    """By layer, for each micro-batch."""
    sample_sec: tuple[float, ...]
    """By layer, for each sample."""
    forward: float = 1 / 3
    """The part of it that is forward."""
    update_sec: float = 0.0
    """The optimizer's, for each parameter."""
    update_sec_per_byte: float = 0.0
    """The same, for each of their bytes."""
    call_sec: float = 0.0
    """To copy a tensor, however small."""
    copy_sec_per_byte: float = 0.0
    """To copy what is not in a cache."""
    base_bytes: float = 0.0
    """That it uses besides parameters, state and activations."""
    start_bytes: float = 0.0
    """That it uses before the layers are divided."""
    steps_at_once: bool = False
    """Whether its optimizer steps all parameters at once, with temporary memory for each."""
    node: int = 0
    """Its host. Those of different hosts send at once; those of one host take turns."""

    def scaled(self, factor: float) -> RankFacts:
        """Return the facts of a rank that takes so many times as long."""
        times = self.fixed_sec, self.sample_sec
        fixed, sample = (tuple(factor * sec for sec in own) for own in times)
        update = factor * self.update_sec_per_byte
        return replace(self, fixed_sec=fixed, sample_sec=sample, update_sec_per_byte=update)

    def update_seconds(self, count: float, size: float) -> float:
        """Return what its optimizer takes to step so many parameters of so many bytes."""
        return count * self.update_sec + size * self.update_sec_per_byte

    def handling_seconds(self, layout: str, count: int, size: int) -> float:
        """Return what `HANDLING` says that it takes for so many parameters of so many bytes."""
        once, each, passes = HANDLING[layout]
        return (once + each * count) * self.call_sec + passes * size * self.copy_sec_per_byte


@dataclass(frozen=True)
class PipelineJob:
    """What a pipeline is planned from."""

    layers: tuple[Layer, ...]
    ranks: tuple[RankFacts, ...]
    global_batch: int
    min_batch: int = 1
    micro_batch: int = 0
    """The most samples of a micro-batch; 0: choose."""
    links: Mapping[str, Hop] = field(default_factory=dict)
    """By two kinds, in alphabetical order: a message's latency, and seconds for each byte."""

    def hop(self, one: str, other: str, size: float) -> Hop:
        """Return what so many bytes take between two kinds."""
        link = self.links.get(f"{min(one, other)} {max(one, other)}", Hop(0.0, 0.0))
        return Hop(link.latency_sec, size * link.busy_sec)

    @cached_property
    def sums(self) -> list[tuple[list[float], list[float]]]:
        """By rank, the seconds of all layers before each, for micro-batches and for samples."""
        known: dict[Any, tuple[list[float], list[float]]] = {}
        for facts in self.ranks:
            own = facts.fixed_sec, facts.sample_sec, facts.copy_sec_per_byte
            if own not in known:
                # All micro-batches of a step but one add to gradients that are there.
                adding = [each.trained_bytes * facts.copy_sec_per_byte for each in self.layers]
                fixed = itertools.accumulate(map(add, own[0], adding), initial=0.0)
                less = [each / self.global_batch for each in adding]
                sample = itertools.accumulate(map(sub, own[1], less), initial=0.0)
                known[own] = [*fixed], [*sample]
        return [
            known[each.fixed_sec, each.sample_sec, each.copy_sec_per_byte] for each in self.ranks
        ]

    def seconds(self, rank: int, begin: int, end: int, samples: float) -> float:
        """Return a rank's seconds for a micro-batch through some layers."""
        fixed, sample = self.sums[rank]
        return fixed[end] - fixed[begin] + samples * (sample[end] - sample[begin])

    def links_of(self, stage: Stage) -> int:
        """Return how many links a stage has to others."""
        return len({self.ranks[rank].node for rank in stage.ranks})

    @property
    def is_large(self) -> bool:
        """Whether there are so many ranks and layers that fewer plans have to do."""
        ranks, layers = len(self.ranks), len(self.layers)
        return ranks > _MANY_RANKS or ranks * layers**2 > _MUCH_WORK


def predict(
    job: PipelineJob, stages: Sequence[Stage], micro_batch: int, ahead: int
) -> PipelinePlan:
    """Return a plan with the seconds of its step and the peak memory of each rank."""
    count = math.ceil(job.global_batch / micro_batch)
    samples = job.global_batch / count
    timed = tuple(
        replace(s, seconds=tuple(job.seconds(r, s.begin, s.end, samples) for r in s.ranks))
        for s in stages
    )
    kinds = [job.ranks[stage.ranks[0]].kind for stage in timed]
    links = [min(map(job.links_of, pair)) for pair in itertools.pairwise(timed)]
    hops = [
        job.hop(*pair, samples * job.layers[stage.end - 1].output_bytes / number)
        for stage, pair, number in zip(timed, itertools.pairwise(kinds), links, strict=False)
    ]
    if 2 * count * len(timed) <= _LONG_SIMULATION:
        forward = sum(job.ranks[s.ranks[0]].forward for s in timed) / len(timed)
        step = simulate(timed, hops, count, ahead, forward)
    else:
        step = _in_short(timed, hops, count)
    step += max(_update_sec(job, stage) for stage in timed)
    memory = _memory(job, timed, count, samples, ahead)
    return PipelinePlan(timed, micro_batch, ahead, step, memory)


def fits(job: PipelineJob, plan: PipelinePlan) -> bool:
    """Return whether each rank has the memory."""
    pairs = zip(job.ranks, plan.bytes_by_rank, strict=True)
    return all(size <= facts.memory_bytes for facts, size in pairs)


def _in_short(stages: Sequence[Stage], hops: Sequence[Hop], count: int) -> float:
    rates = [sum(1 / each for each in stage.seconds) for stage in stages]
    total = sum(len(s.seconds) / rate for s, rate in zip(stages, rates, strict=True))
    longest = max([*(1 / rate for rate in rates), *(hop.busy_sec for hop in hops)])
    return total + sum(2 * sum(hop) for hop in hops) + (count - 1) * longest


def _update_sec(job: PipelineJob, stage: Stage) -> float:
    """Return the seconds of a stage's sum of gradients, of its check, and of its optimizer."""
    layers = job.layers[stage.begin : stage.end]
    count, trained = sum(one.trained for one in layers), sum(one.trained_bytes for one in layers)
    own = max(
        facts.update_seconds(count, trained) + facts.handling_seconds("pipeline", count, trained)
        for facts in (job.ranks[rank] for rank in stage.ranks)
    )
    kind, ranks = job.ranks[stage.ranks[0]].kind, len(stage.ranks)
    exchanged = job.hop(kind, kind, 2 * trained * (ranks - 1) / ranks)
    return own + (sum(exchanged) if ranks > 1 else 0.0)


def _memory(
    job: PipelineJob, stages: Sequence[Stage], count: int, samples: float, ahead: int
) -> tuple[int, ...]:
    by_rank = [int(facts.start_bytes) for facts in job.ranks]
    for stage, window in zip(stages, windows(stages, ahead), strict=True):
        layers, replicas = job.layers[stage.begin : stage.end], len(stage.ranks)
        owned = sum(layer.weight_bytes + layer.state_bytes for layer in layers)
        largest = max(layer.largest_bytes for layer in layers)
        trained = sum(layer.trained_bytes for layer in layers)
        casts = sum(layer.cast_bytes for layer in layers)
        kept = samples * sum(layer.kept_bytes for layer in layers)
        ends = job.layers[max(0, stage.begin - 1)].output_bytes + layers[-1].output_bytes
        share = math.ceil(min(count, window) / replicas)
        taken: dict[int, list[int]] = {}
        for number, taker in enumerate(() if job.is_large else stage.takers(count)[: 4 * window]):
            taken.setdefault(taker, []).append(number)
        owned += BUCKET_BYTES * (replicas > 1)
        for rank in stage.ranks:
            most = share if job.is_large else most_kept(taken.get(rank, []), window)
            facts, computing = job.ranks[rank], most * kept + TRANSIT * samples * ends + largest
            computing += casts
            stepping = trained if facts.steps_at_once else TEMPORARIES * largest
            peak = facts.base_bytes + owned + max(computing, stepping)
            by_rank[rank] = max(by_rank[rank], int(peak))
    return tuple(by_rank)
