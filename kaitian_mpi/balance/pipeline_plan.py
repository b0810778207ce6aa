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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kaitian_mpi.balance.pipeline import PipelinePlan, Stage
from kaitian_mpi.balance.pipeline_cost import (
    BUCKET_BYTES,
    TEMPORARIES,
    TRANSIT,
    PipelineJob,
    fits,
    predict,
)

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)  # of micro-batches
_COUNTS_OF_MANY = (1 / 4, 1 / 2, 1, 4)  # times the ranks
_BOUNDS = 10
_ALIKE_MEMORY, _ALIKE_SPEED = 1.25, 1.5
_ALL_ORDERS = 4  # groups
_STAGES_OF_MANY = (1, 2, 3, 4, 6, 8, 12, 16)
_FEW = 8
_SIMULATED = 12  # plans that are compared in detail
_AHEADS = (0, 1, 3)
_BOUNDS_OF_MANY = 8
# Stages are moved if ranks' speeds have changed by this much, the step gets faster by this much,
# and the steps left save more than the move takes: these seconds, and those to send the parameters.
_MIN_CHANGE = 1.1
_MIN_GAIN = 1.05
_MOVING_SEC = 1.0


def plan_pipeline(job: PipelineJob) -> PipelinePlan | None:
    """Return the plan with the shortest step of those that fit; None if none does."""
    groups = _groups(job)
    found: dict[tuple[tuple[Stage, ...], int], float] = {}
    for size in _sizes(job):
        count = math.ceil(job.global_batch / size)
        for order in _orders(job, groups):
            for stages, seconds in _splits(job, order, count):
                found.setdefault((stages, size), seconds)
    best: Any = None
    for stages, size in sorted(found, key=lambda each: found[each]):
        best = _better(job, [stages], size, best)
        found[stages, size] = math.inf
        if best is not None and sum(map(math.isinf, found.values())) >= _SIMULATED:
            break
    is_better = best is not None and not job.is_large
    while is_better:  # the formula knows neither the order nor the times of messages
        before = best
        best = _better(job, _neighbors(best.stages), best.micro_batch, best)
        is_better = best is not before
    return best


def _sizes(job: PipelineJob) -> list[int]:
    """Return the sizes of micro-batches to try."""
    if job.micro_batch:
        return [job.micro_batch]
    ranks = len(job.ranks)
    counts = [ranks * part for part in _COUNTS_OF_MANY] if job.is_large else _COUNTS
    sizes = {math.ceil(job.global_batch / count) for count in counts}
    return sorted(size for size in sizes if size >= min(job.min_batch, job.global_batch))


def _better(
    job: PipelineJob, splits: Iterable[Sequence[Stage]], size: int, best: PipelinePlan | None
) -> PipelinePlan | None:
    """Return the best plan of some splits, or the one that is best so far."""
    for stages in splits:
        for ahead in _AHEADS[:1] if job.is_large else _AHEADS:
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


def _orders(job: PipelineJob, groups: list[list[int]]) -> Iterator[Sequence[list[int]]]:
    if len(groups) <= _ALL_ORDERS and not job.is_large:
        yield from itertools.permutations(groups)
    else:
        yield groups
        yield groups[::-1]


def _splits(
    job: PipelineJob, order: Sequence[list[int]], count: int
) -> Iterator[tuple[tuple[Stage, ...], float]]:
    """Yield splits of the layers over the groups, each the best for some longest stage.

    With about the seconds of a step, by the formula.
    """
    program, bounds = _Program(job, order, count), _BOUNDS_OF_MANY if job.is_large else _BOUNDS
    first = found = program.solve(math.inf)
    for step in range(1, bounds + 1):
        if first is None or found is None:
            return
        stages, total, longest = found
        yield stages, total + (count - 1) * longest
        high, low = first[2], program.least
        bound = high * (low / high) ** (step / (bounds - 1)) if low > 0 else 0.0
        found = program.solve(min(bound * (1 + 1e-9), longest * (1 - 1e-9)))


class _Program:
    """The dynamic program for one order of the groups and one number of micro-batches."""

    def __init__(self, job: PipelineJob, order: Sequence[list[int]], count: int) -> None:
        self._job = job
        self._order = order
        self._count = count
        self._samples = job.global_batch / count
        layers = job.layers
        self._size = len(layers)
        self._owned = _between([one.weight_bytes + one.state_bytes for one in layers])
        self._largest = _largest([one.largest_bytes for one in layers])
        self._trained = _between([one.trained_bytes for one in layers])
        self._kept = _between([one.kept_bytes * self._samples for one in layers])
        self._outputs = np.array([0.0, *(one.output_bytes for one in layers)]) * self._samples
        ends = self._outputs[:-1, None] + self._outputs[None, :]
        self._transit = np.zeros_like(self._kept)
        self._transit[:-1] = TRANSIT * ends
        self._times = []
        self._speeds = []
        self._chunks: dict[tuple[int, int, int], tuple[float, np.ndarray]] = {}
        for group in order:
            fixed, sample = map(np.diff, job.sums[group[0]])
            self._times.append(_between(fixed + self._samples * sample))
            whole = [job.seconds(rank, 0, self._size, self._samples) for rank in group]
            self._speeds.append([whole[0] / max(each, 1e-12) for each in whole])
        rates = [sum(s) / t[0, -1] for s, t in zip(self._speeds, self._times, strict=True)]
        self.least = 1 / sum(rates)
        """A bound that no split can fall below."""

    def solve(self, bound: float) -> tuple[tuple[Stage, ...], float, float] | None:
        """Return the stages with the least sum, of those within the bound; None if none fit.

        With the sum, and the longest of their times.
        """
        best = np.full(self._size + 1, np.inf)
        best[-1] = 0.0
        after = np.zeros(self._size + 1)  # ranks that come after a layer
        choices: list[tuple[np.ndarray, dict[int, list[np.ndarray]]]] = []
        for place in reversed(range(len(self._order))):
            chosen = np.zeros(self._size + 1, int)
            merged = best.copy()
            follows = after.copy()
            ways: dict[int, list[np.ndarray]] = {}
            for number in _numbers(len(self._order[place]), self._size):
                sums, ranks, ways[number] = self._group(place, number, best, after, bound)
                better = sums < merged
                chosen[better] = number
                merged[better] = sums[better]
                follows[better] = ranks[better]
            best, after = merged, follows
            choices.append((chosen, ways))
        if not np.isfinite(best[0]):
            return None
        stages, longest = self._trace(choices[::-1])
        return stages, float(best[0]), longest

    def _group(
        self, place: int, number: int, best: np.ndarray, after: np.ndarray, bound: float
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return the least sums with a group in so many stages, before what is best after it."""
        group, ways = self._order[place], []
        job, kind = self._job, self._job.ranks[self._order[place][0]].kind
        chunks = _chunks(len(group), number)
        for chunk, (begin, end) in reversed([*enumerate(chunks)]):
            ranks, (speed, spare) = end - begin, self._chunk(place, begin, end)
            busy, latency = self._hops(place, (begin, end), is_last=chunk == number - 1)
            hop = 2 * (busy + latency * (busy > 0))
            times = self._times[place]
            kept = np.minimum(np.ceil((ranks + after) / ranks), math.ceil(self._count / ranks))
            cost = times * (ranks / speed) + (hop + best)
            if ranks > 1:  # the sum of the replicas' gradients
                cost = cost + self._trained * job.hop(kind, kind, 2 * (ranks - 1) / ranks).busy_sec
            cost[(kept * self._kept > spare) | (times > bound * speed)] = np.inf
            cost[:, busy > bound] = np.inf
            way = cost.argmin(axis=1)
            ways.append(way)
            best = np.take_along_axis(cost, way[:, None], 1)[:, 0]
            after = after[way] + ranks
        return best, after, ways[::-1]

    def _chunk(self, place: int, begin: int, end: int) -> tuple[float, np.ndarray]:
        """Return the speed of some ranks of a group, and their memory for activations."""
        if (place, begin, end) not in self._chunks:
            facts = [self._job.ranks[rank] for rank in self._order[place][begin:end]]
            room = min(each.memory_bytes - each.base_bytes for each in facts)
            room -= BUCKET_BYTES * (len(facts) > 1)
            at_once = any(each.steps_at_once for each in facts)
            stepping = self._trained if at_once else TEMPORARIES * self._largest
            spare = room - self._owned - self._largest - self._transit
            spare[(self._owned + stepping > room) | (self._times[place] <= 0)] = -1.0
            self._chunks[place, begin, end] = sum(self._speeds[place][begin:end]), spare
        return self._chunks[place, begin, end]

    def _hops(self, place: int, chunk: tuple[int, int], is_last: bool) -> tuple[np.ndarray, float]:
        """Return how long links are busy, and their latency, after a stage of a group.

        The last of the group has the next group's after it, of whichever kind that is.
        """
        job, ranks = self._job, self._order[place][slice(*chunk)]
        kind = job.ranks[ranks[0]].kind
        others = {job.ranks[group[0]].kind for group in self._order[place + 1 :]}
        found = [job.hop(kind, other, 1) for other in (others if is_last else ()) or {kind}]
        links = len({job.ranks[rank].node for rank in ranks})
        busy = self._outputs * max(each.busy_sec for each in found) / links
        busy[-1] = 0.0
        return busy, max(each.latency_sec for each in found)

    def _trace(
        self, choices: Sequence[tuple[np.ndarray, dict[int, list[np.ndarray]]]]
    ) -> tuple[tuple[Stage, ...], float]:
        """Return the stages that were chosen, and the longest of their times."""
        layer = 0
        stages = list[Stage]()
        longest = 0.0
        for place, (chosen, ways) in enumerate(choices):
            number, group = int(chosen[layer]), self._order[place]
            if not number:
                continue
            chunks = _chunks(len(group), number)
            for way, (begin, end) in zip(ways[number], chunks, strict=True):
                target, ranks = int(way[layer]), tuple(group[begin:end])
                stages.append(Stage(layer, target, ranks, (1.0,) * len(ranks)))
                time = self._times[place][layer, target] / sum(self._speeds[place][begin:end])
                busy, _ = self._hops(place, (begin, end), is_last=end == len(group))
                longest, layer = max(longest, float(time), float(busy[target])), target
        return tuple(stages), longest


def _between(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return a matrix of the sums from one place to before another; 0 where that is not after."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.maximum(sums[None, :] - sums[:, None], 0.0) * (
        np.arange(len(sums))[:, None] < np.arange(len(sums))[None, :]
    )


def _largest(values: Sequence[float]) -> np.ndarray:
    """Return a matrix of the largest from one place to before another."""
    found = np.zeros((len(values) + 1, len(values) + 1))
    for begin in range(len(values)):
        found[begin, begin + 1 :] = np.maximum.accumulate(values[begin:])
    return found


def _numbers(ranks: int, layers: int) -> list[int]:
    """Return in how many stages so many ranks may be."""
    numbers = range(1, ranks + 1) if ranks <= _FEW else _STAGES_OF_MANY
    return [number for number in numbers if number <= min(ranks, layers)]


def _chunks(ranks: int, number: int) -> list[tuple[int, int]]:
    sizes = [ranks // number + (place < ranks % number) for place in range(number)]
    return [*itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def replan(
    job: PipelineJob, plan: PipelinePlan, work_sec: Sequence[float], steps: int
) -> tuple[list[float], str] | None:
    """Return how ranks' speeds have changed, and what is gained, if other stages are worth a move.

    `work_sec` is what each rank has computed in a step by the plan, of which so many are left.
    """
    factors, count = [1.0] * len(job.ranks), math.ceil(job.global_batch / plan.micro_batch)
    for stage in plan.stages:
        takers, layers = stage.takers(count), job.layers[stage.begin : stage.end]
        trained = sum(one.trained for one in layers), sum(one.trained_bytes for one in layers)
        for rank, seconds in zip(stage.ranks, stage.seconds, strict=True):
            if number := takers.count(rank):
                planned = number * seconds + job.ranks[rank].update_seconds(*trained)
                factors[rank] = max(work_sec[rank], 1e-9) / planned
    used = [factors[rank] for stage in plan.stages for rank in stage.ranks]
    if max(used) < _MIN_CHANGE * min(used):
        return None
    pairs = zip(job.ranks, factors, strict=True)
    job = replace(job, ranks=tuple(facts.scaled(factor) for facts, factor in pairs))
    before = predict(job, plan.stages, plan.micro_batch, plan.ahead).step_sec
    if (found := plan_pipeline(job)) is None or before < _MIN_GAIN * found.step_sec:
        return None
    size = sum(layer.weight_bytes + layer.state_bytes for layer in job.layers)  # at most
    moving = _MOVING_SEC + size * max((hop.busy_sec for hop in job.links.values()), default=0.0)
    if (before - found.step_sec) * steps <= moving:
        return None
    return factors, f"new stages, for a step of {1e3 * found.step_sec:.0f} ms"
