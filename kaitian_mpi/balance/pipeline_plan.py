"""Plans a pipeline: which ranks compute which layers, so that a step is short and memory suffices.

The step is sum(f + b) + (M - 1) max(f + b) over the stages, for M micro-batches, with what they
send each other. A dynamic program over the layers finds the least sum for a bound on the maximum;
several bounds are tried. Restricted: ranks that are alike (kind, memory and speed) are neighbors in
the order of the stages, and divided evenly among theirs. All orders of up to four such groups are
tried; of more, only that by memory, and its reverse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kaitian_mpi.balance.pipeline import Hop, PipelinePlan, Stage, most_kept, simulate, windows

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192, 32768)  # of micro-batches
_MOST_COUNT = 128  # in small jobs
_BOUNDS = 10
_ALIKE_MEMORY, _ALIKE_SPEED = 1.25, 1.5
_ALL_ORDERS = 4  # groups
_STAGES_OF_MANY = (1, 2, 3, 4, 6, 8, 12, 16)
_FEW = 8
_SIMULATED = 12  # plans that are compared in detail
_LONG_SIMULATION = 20_000  # actions
_AHEADS = (0, 1, 3)
_MANY_RANKS = 256
_TRANSIT = 4  # activations of a micro-batch that are sent or received while it is computed
_BUCKET_BYTES = 16 << 20


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
    update_sec_per_byte: float = 0.0
    """The optimizer's, by bytes of parameters."""
    base_bytes: float = 0.0
    """That it uses besides parameters, state and activations."""
    start_bytes: float = 0.0
    """That it uses before the layers are divided."""


@dataclass(frozen=True)
class PipelineJob:
    """What a pipeline is planned from."""

    layers: tuple[Layer, ...]
    ranks: tuple[RankFacts, ...]
    global_batch: int
    min_batch: int = 1
    micro_batch: int = 0
    """The most samples of a micro-batch; 0: choose."""
    links: Mapping[tuple[str, str], Hop] = field(default_factory=dict)
    """Between kinds, in alphabetical order: a message's latency, and seconds for each byte."""

    def hop(self, one: str, other: str, size: float) -> Hop:
        """Return what so many bytes take between two kinds."""
        link = self.links.get((min(one, other), max(one, other)), Hop(0.0, 0.0))
        return Hop(link.latency_sec, size * link.busy_sec)

    def seconds(self, rank: int, begin: int, end: int, samples: float) -> float:
        """Return a rank's seconds for a micro-batch through some layers."""
        facts = self.ranks[rank]
        return sum(facts.fixed_sec[begin:end]) + samples * sum(facts.sample_sec[begin:end])


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
    hops = [
        job.hop(*pair, samples * job.layers[stage.end - 1].output_bytes)
        for stage, pair in zip(timed, itertools.pairwise(kinds), strict=False)
    ]
    if 2 * count * len(timed) <= _LONG_SIMULATION:
        forward = sum(job.ranks[s.ranks[0]].forward for s in timed) / len(timed)
        step = simulate(timed, hops, count, ahead, forward)
    else:
        step = _in_short(timed, hops, count)
    step += max(_update_sec(job, stage) for stage in timed)
    memory = _memory(job, timed, count, samples, ahead)
    return PipelinePlan(timed, micro_batch, ahead, step, memory)


def plan_pipeline(job: PipelineJob) -> PipelinePlan | None:
    """Return the plan with the shortest step of those that fit; None if none does."""
    most = max(_MOST_COUNT, 4 * len(job.ranks))
    sizes = {math.ceil(job.global_batch / count) for count in _COUNTS if count <= most}
    if job.micro_batch:
        sizes = {job.micro_batch}
    found: dict[tuple[tuple[Stage, ...], int], float] = {}
    for size in sizes:
        if size < min(job.min_batch, job.global_batch):
            continue
        count = math.ceil(job.global_batch / size)
        for order in _orders(_groups(job)):
            for stages in _splits(job, order, count):
                found.setdefault((stages, size), predict_in_short(job, stages, count))
    best: Any = None
    for stages, size in sorted(found, key=lambda each: found[each])[:_SIMULATED]:
        best = _better(job, [stages], size, best)
    is_better = best is not None and len(job.ranks) <= _MANY_RANKS
    while is_better:  # the formula knows neither the order nor the times of messages
        before = best
        best = _better(job, _neighbors(best.stages), best.micro_batch, best)
        is_better = best is not before
    return best


def _better(
    job: PipelineJob, splits: Iterable[Sequence[Stage]], size: int, best: PipelinePlan | None
) -> PipelinePlan | None:
    """Return the best plan of some splits, or the one that is best so far."""
    for stages in splits:
        for ahead in _AHEADS:
            plan = predict(job, stages, size, ahead)
            if fits(job, plan) and (best is None or plan.step_sec < best.step_sec):
                best = plan
    return best


def _neighbors(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """Yield splits with one layer on the other side."""
    for place, (one, other) in enumerate(itertools.pairwise(stages)):
        for end in (one.end - 1, one.end + 1):
            if one.begin < end < other.end:
                changed = [replace(one, end=end), replace(other, begin=end)]
                yield [*stages[:place], *changed, *stages[place + 2 :]]


def fits(job: PipelineJob, plan: PipelinePlan) -> bool:
    """Return whether each rank has the memory."""
    pairs = zip(job.ranks, plan.bytes_by_rank, strict=True)
    return all(size <= facts.memory_bytes for facts, size in pairs)


def predict_in_short(job: PipelineJob, stages: Sequence[Stage], count: int) -> float:
    """Return about the seconds of a step, by the formula."""
    samples, total, longest = job.global_batch / count, 0.0, 0.0
    for stage in stages:
        own = [job.seconds(rank, stage.begin, stage.end, samples) for rank in stage.ranks]
        total += len(own) / sum(1 / each for each in own)
        longest = max(longest, 1 / sum(1 / each for each in own))
    for one, other in itertools.pairwise(stages):
        kinds = job.ranks[one.ranks[0]].kind, job.ranks[other.ranks[0]].kind
        hop = job.hop(*kinds, samples * job.layers[one.end - 1].output_bytes)
        total += 2 * sum(hop)
        longest = max(longest, hop.busy_sec)
    return total + (count - 1) * longest


def _in_short(stages: Sequence[Stage], hops: Sequence[Hop], count: int) -> float:
    rates = [sum(1 / each for each in stage.seconds) for stage in stages]
    total = sum(len(s.seconds) / rate for s, rate in zip(stages, rates, strict=True))
    longest = max([*(1 / rate for rate in rates), *(hop.busy_sec for hop in hops)])
    return total + sum(2 * sum(hop) for hop in hops) + (count - 1) * longest


def _update_sec(job: PipelineJob, stage: Stage) -> float:
    """Return the seconds of a stage's sum of gradients and of its optimizer."""
    weights = sum(layer.weight_bytes for layer in job.layers[stage.begin : stage.end])
    kind, ranks = job.ranks[stage.ranks[0]].kind, len(stage.ranks)
    exchanged = job.hop(kind, kind, 2 * weights * (ranks - 1) / ranks)
    return max(job.ranks[r].update_sec_per_byte for r in stage.ranks) * weights + (
        sum(exchanged) if ranks > 1 else 0.0
    )


def _memory(
    job: PipelineJob, stages: Sequence[Stage], count: int, samples: float, ahead: int
) -> tuple[int, ...]:
    by_rank = [int(facts.start_bytes) for facts in job.ranks]
    for stage, window in zip(stages, windows(stages, ahead), strict=True):
        layers = job.layers[stage.begin : stage.end]
        size = sum(layer.weight_bytes + layer.state_bytes for layer in layers)
        size += _BUCKET_BYTES * (len(stage.ranks) > 1)
        kept = samples * sum(layer.kept_bytes for layer in layers)
        ends = job.layers[max(0, stage.begin - 1)].output_bytes + layers[-1].output_bytes
        taken: dict[int, list[int]] = {}
        for number, taker in enumerate(stage.takers(count)[: 4 * window]):
            taken.setdefault(taker, []).append(number)
        for rank in stage.ranks:
            few = taken.get(rank, [])
            whole = (
                job.ranks[rank].base_bytes
                + size
                + most_kept(few, window) * kept
                + _TRANSIT * samples * ends
            )
            by_rank[rank] = max(by_rank[rank], int(whole))
    return tuple(by_rank)


def _groups(job: PipelineJob) -> list[list[int]]:
    """Return the ranks that are alike, those with the most memory and the fastest first."""
    total = [job.seconds(rank, 0, len(job.layers), 1.0) for rank in range(len(job.ranks))]
    groups: list[list[int]] = []
    facts = job.ranks
    ranks = sorted(
        range(len(facts)), key=lambda r: (facts[r].kind, -facts[r].memory_bytes, total[r], r)
    )
    for rank in ranks:
        for group in groups:
            first = group[0]
            if (
                facts[first].kind == facts[rank].kind
                and facts[first].memory_bytes <= _ALIKE_MEMORY * facts[rank].memory_bytes
                and 1 / _ALIKE_SPEED <= total[rank] / total[first] <= _ALIKE_SPEED
            ):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return sorted(groups, key=lambda g: (-facts[g[0]].memory_bytes, total[g[0]]))


def _orders(groups: list[list[int]]) -> Iterator[Sequence[list[int]]]:
    if len(groups) <= _ALL_ORDERS:
        yield from itertools.permutations(groups)
    else:
        yield groups
        yield groups[::-1]


def _splits(
    job: PipelineJob, order: Sequence[list[int]], count: int
) -> Iterator[tuple[Stage, ...]]:
    """Yield splits of the layers over the groups, each the best for some longest stage."""
    program = _Program(job, order, count)
    stages = program.solve(math.inf)
    if stages is None:
        return
    yield stages
    high, low = program.longest(stages), program.least
    for step in range(1, _BOUNDS):
        bound = high * (low / high) ** (step / (_BOUNDS - 1)) if low > 0 else 0.0
        found = program.solve(bound * (1 + 1e-9))
        if found is None:
            return
        if found != stages:
            stages = found
            yield stages


class _Program:
    """The dynamic program for one order of the groups and one number of micro-batches."""

    def __init__(self, job: PipelineJob, order: Sequence[list[int]], count: int) -> None:
        self._job, self._order, self._count = job, order, count
        self._samples = job.global_batch / count
        layers = job.layers
        self._size = len(layers)
        self._weights = _between([one.weight_bytes + one.state_bytes for one in layers])
        self._kept = _between([one.kept_bytes * self._samples for one in layers])
        self._outputs = np.array([0.0, *(one.output_bytes for one in layers)]) * self._samples
        ends = self._outputs[:-1, None] + self._outputs[None, :]
        self._transit = np.zeros_like(self._kept)
        self._transit[:-1] = _TRANSIT * ends
        self._times, self._speeds = [], []
        for group in order:
            first = job.ranks[group[0]]
            times = np.array(first.fixed_sec) + self._samples * np.array(first.sample_sec)
            self._times.append(_between(times))
            whole = [job.seconds(rank, 0, self._size, self._samples) for rank in group]
            self._speeds.append([whole[0] / max(each, 1e-12) for each in whole])
        rates = [sum(s) / t[0, -1] for s, t in zip(self._speeds, self._times, strict=True)]
        self.least = 1 / sum(rates)
        """A bound that no split can fall below."""

    def longest(self, stages: Sequence[Stage]) -> float:
        rates = [
            sum(1 / self._job.seconds(r, s.begin, s.end, self._samples) for r in s.ranks)
            for s in stages
        ]
        return max(1 / rate for rate in rates)

    def solve(self, bound: float) -> tuple[Stage, ...] | None:
        """Return the stages with the least sum, of those within the bound; None if none fit."""
        best = np.full(self._size + 1, np.inf)
        best[-1] = 0.0
        after = np.zeros(self._size + 1)  # ranks that come after a layer
        choices: list[tuple[np.ndarray, dict[int, list[np.ndarray]]]] = []
        for place in reversed(range(len(self._order))):
            chosen, merged, follows = np.zeros(self._size + 1, int), best.copy(), after.copy()
            ways: dict[int, list[np.ndarray]] = {}
            for number in _numbers(len(self._order[place]), self._size):
                sums, ranks, ways[number] = self._group(place, number, best, after, bound)
                better = sums < merged
                chosen[better], merged[better], follows[better] = (
                    number,
                    sums[better],
                    ranks[better],
                )
            best, after = merged, follows
            choices.append((chosen, ways))
        return self._trace(choices[::-1]) if np.isfinite(best[0]) else None

    def _group(
        self, place: int, number: int, best: np.ndarray, after: np.ndarray, bound: float
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return the least sums with a group in so many stages, before what is best after it."""
        group, ways = self._order[place], []
        job, kind = self._job, self._job.ranks[self._order[place][0]].kind
        others = {job.ranks[g[0]].kind for g in self._order[place + 1 :]} or {kind}
        chunks = _chunks(len(group), number)
        for chunk, (begin, end) in reversed([*enumerate(chunks)]):
            speed, ranks = sum(self._speeds[place][begin:end]), end - begin
            kinds = others if chunk == number - 1 else {kind}
            latency = max(job.hop(kind, other, 0).latency_sec for other in kinds)
            busy = self._outputs * max(job.hop(kind, other, 1).busy_sec for other in kinds)
            busy[-1] = 0.0
            hop = 2 * (busy + latency * (busy > 0))
            times = self._times[place]
            kept = np.minimum(np.ceil((ranks + after) / ranks), math.ceil(self._count / ranks))
            memory = self._weights + kept * self._kept + self._transit
            memory += _BUCKET_BYTES * (ranks > 1)
            facts = [job.ranks[rank] for rank in group[begin:end]]
            room = min(each.memory_bytes - each.base_bytes for each in facts)
            cost = times * (ranks / speed) + hop + best
            cost[(memory > room) | (times / speed > bound) | (times <= 0)] = np.inf
            cost[:, busy > bound] = np.inf
            way = cost.argmin(axis=1)
            ways.append(way)
            best = np.take_along_axis(cost, way[:, None], 1)[:, 0]
            after = after[way] + ranks
        return best, after, ways[::-1]

    def _trace(
        self, choices: Sequence[tuple[np.ndarray, dict[int, list[np.ndarray]]]]
    ) -> tuple[Stage, ...]:
        layer, stages = 0, list[Stage]()
        for group, (chosen, ways) in zip(self._order, choices, strict=True):
            number = int(chosen[layer])
            if not number:
                continue
            for way, (begin, end) in zip(ways[number], _chunks(len(group), number), strict=True):
                target, ranks = int(way[layer]), tuple(group[begin:end])
                stages.append(Stage(layer, target, ranks, (1.0,) * len(ranks)))
                layer = target
        return tuple(stages)


def _between(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return a matrix of the sums from one place to before another; 0 where that is not after."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.maximum(sums[None, :] - sums[:, None], 0.0) * (
        np.arange(len(sums))[:, None] < np.arange(len(sums))[None, :]
    )


def _numbers(ranks: int, layers: int) -> list[int]:
    """Return in how many stages so many ranks may be."""
    numbers = range(1, ranks + 1) if ranks <= _FEW else _STAGES_OF_MANY
    return [number for number in numbers if number <= min(ranks, layers)]


def _chunks(ranks: int, number: int) -> list[tuple[int, int]]:
    sizes = [ranks // number + (place < ranks % number) for place in range(number)]
    return [*itertools.pairwise(itertools.accumulate(sizes, initial=0))]
