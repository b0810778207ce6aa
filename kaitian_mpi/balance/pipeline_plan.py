"""Plans a pipeline: which ranks compute which layers, so that a step is short and memory suffices.

A step takes sum(f + b) + (M - 1) max(f + b) over the stages, for M micro-batches, where f and b are
a stage's seconds of forward and backward, with sending to the next stage. For a given bound on the
maximum, a dynamic program over the layers finds the least sum; several bounds are tried. To keep
the search small, similar ranks (by kind, memory and speed) form a group, whose stages are
consecutive and divide its ranks evenly. All orders of up to four groups are tried; for more groups,
only the order by memory and its reverse.

A job is large (`PipelineJob.is_large`) if it has so many ranks and layers that fewer plans must be
tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

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

_MICRO_BATCH_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
_COUNTS_PER_RANK = (1 / 4, 1 / 2, 1, 4)  # micro-batches per rank, in a large job
_BOUNDS = 10  # bounds on the longest stage to try
_BOUNDS_OF_LARGE = 8  # the same, in a large job
_ALIKE_MEMORY = 1.25  # ratios within which ranks of one kind form a group
_ALIKE_SPEED = 1.5
_ALL_ORDERS = 4  # for at most so many groups, all orders are tried
_ALL_STAGE_COUNTS = 8  # for at most so many ranks in a group, all numbers of stages are tried
_STAGE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of stages to try for a larger group
_SIMULATED = 12  # plans to compare in detail
_AHEADS = (0, 1, 3)  # extra micro-batches in flight for each later stage, as in `windows`
_BLOCK_ROWS = 64  # rows of a matrix to compute at a time, so that the caches hold them
# Stages move if the ranks' speeds have changed by the first factor, the step gets faster by the
# second, and the steps left save more than a move takes: these seconds, and sending the parameters.
_MIN_CHANGE = 1.1
_MIN_GAIN = 1.05
_MOVING_SEC = 1.0


def plan_pipeline(job: PipelineJob) -> PipelinePlan | None:
    """Return the plan with the shortest step of those that fit; None if none does."""
    groups = _groups(job)
    estimated_sec: dict[tuple[tuple[Stage, ...], int], float] = {}
    for size in _micro_batch_sizes(job):
        count = math.ceil(job.global_batch / size)
        for order in _orders(job, groups):
            for stages, seconds in _splits(job, order, count):
                estimated_sec.setdefault((stages, size), seconds)
    best: PipelinePlan | None = None
    candidates = sorted(estimated_sec, key=lambda candidate: estimated_sec[candidate])
    for number, (stages, size) in enumerate(candidates, start=1):
        best = _best_plan(job, [stages], size, best)
        if best is not None and number >= _SIMULATED:
            break
    if best is None or job.is_large:
        return best
    # The formula ignores the order and the times of messages, so the best plan may be next to it.
    while True:
        better = _best_plan(job, _neighbors(best.stages), best.micro_batch, best)
        if better is best or better is None:
            return best
        best = better


def _micro_batch_sizes(job: PipelineJob) -> list[int]:
    """Return the sizes of micro-batches to try, in samples."""
    if job.micro_batch:
        return [job.micro_batch]
    counts: Sequence[float] = _MICRO_BATCH_COUNTS
    if job.is_large:
        counts = [len(job.ranks) * count for count in _COUNTS_PER_RANK]
    sizes = {math.ceil(job.global_batch / count) for count in counts}
    return sorted(size for size in sizes if size >= min(job.min_batch, job.global_batch))


def _best_plan(
    job: PipelineJob, splits: Iterable[Sequence[Stage]], size: int, best: PipelinePlan | None
) -> PipelinePlan | None:
    """Return the fastest of `best` and the plans with these splits that fit."""
    for stages in splits:
        for ahead in _AHEADS[:1] if job.is_large else _AHEADS:
            plan = predict(job, stages, size, ahead)
            if fits(job, plan) and (best is None or plan.step_sec < best.step_sec):
                best = plan
    return best


def _neighbors(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """Yield the splits in which one layer moves to the next or the previous stage."""
    for place, (stage, following) in enumerate(itertools.pairwise(stages)):
        for end in (stage.end - 1, stage.end + 1):
            if stage.begin < end < following.end:
                changed = list(stages)
                changed[place] = replace(stage, end=end)
                changed[place + 1] = replace(following, begin=end)
                yield changed


def _groups(job: PipelineJob) -> list[list[int]]:
    """Return groups of similar ranks, those with the most memory and the fastest first."""
    seconds = [job.seconds(rank, 0, len(job.layers), 1.0) for rank in range(len(job.ranks))]
    groups: list[list[int]] = []
    facts = job.ranks

    def are_alike(one: int, other: int) -> bool:
        return (
            facts[one].kind == facts[other].kind
            and facts[one].memory_bytes <= _ALIKE_MEMORY * facts[other].memory_bytes
            and 1 / _ALIKE_SPEED <= seconds[other] / seconds[one] <= _ALIKE_SPEED
        )

    ranks = sorted(
        range(len(facts)), key=lambda r: (facts[r].kind, -facts[r].memory_bytes, seconds[r], r)
    )
    for rank in ranks:
        group = next((group for group in groups if are_alike(group[0], rank)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return sorted(groups, key=lambda g: (-facts[g[0]].memory_bytes, seconds[g[0]]))


def _orders(job: PipelineJob, groups: list[list[int]]) -> Iterator[Sequence[list[int]]]:
    """Yield the orders of the groups to try."""
    if len(groups) <= _ALL_ORDERS and not job.is_large:
        yield from itertools.permutations(groups)
    else:
        yield groups
        yield groups[::-1]


def _splits(
    job: PipelineJob, order: Sequence[list[int]], count: int
) -> Iterator[tuple[tuple[Stage, ...], float]]:
    """Yield splits of the layers over the groups, each the best for a bound on the longest stage.

    Each split comes with the approximate seconds of its step, by the formula.
    """
    program = _Program(job, order, count)
    bounds = _BOUNDS_OF_LARGE if job.is_large else _BOUNDS
    solution = program.solve(math.inf)
    if solution is None:
        return
    _, _, greatest = solution
    least = program.least
    for step in range(1, bounds + 1):
        stages, total, longest = solution
        yield stages, total + (count - 1) * longest
        # The bounds fall in equal ratios from the greatest to the least; each is also below the
        # longest stage of the last solution.
        bound = greatest * (least / greatest) ** (step / (bounds - 1)) if least > 0 else 0.0
        solution = program.solve(min(bound * (1 + 1e-9), longest * (1 - 1e-9)))
        if solution is None:
            return


_Solved = tuple[np.ndarray, np.ndarray, list[np.ndarray]]
"""For some consecutive stages, by the layer that the first begins with: the least sum of their
seconds, the number of ranks, and for each stage the layer that the next one begins with."""


class _Program:
    """The dynamic program for one order of the groups and one number of micro-batches.

    Row i, column k of its matrices is about a stage that begins with layer i and has k + 1 layers.
    So only as many columns are computed as a stage has memory for layers.
    """

    def __init__(self, job: PipelineJob, order: Sequence[list[int]], count: int) -> None:
        self._job = job
        self._order = order
        self._count = count
        self._samples = job.global_batch / count
        layers = job.layers
        self._size = len(layers)
        self._owned = _between([layer.weight_bytes + layer.state_bytes for layer in layers])
        self._largest = _largest([layer.largest_bytes for layer in layers])
        self._trained = _between([layer.trained_bytes for layer in layers])
        self._kept = _between([layer.kept_bytes * self._samples for layer in layers])
        output_bytes = [0.0, *(layer.output_bytes for layer in layers)]
        self._outputs = np.array(output_bytes) * self._samples
        self._transit = TRANSIT * (self._outputs[:-1, None] + _by_length(self._outputs))
        self._transit += _largest([layer.temporary_bytes * self._samples for layer in layers])
        self._times = []
        self._speeds = []
        self._spares: dict[tuple[int, float, bool], tuple[np.ndarray, int]] = {}
        for group in order:
            fixed, sample = map(np.diff, job.sums[group[0]])
            self._times.append(_between(fixed + self._samples * sample, past=np.inf))
            rank_sec = [job.seconds(rank, 0, self._size, self._samples) for rank in group]
            self._speeds.append([rank_sec[0] / max(seconds, 1e-12) for seconds in rank_sec])
        rates = [
            sum(speeds) / times[0, self._size - 1]
            for speeds, times in zip(self._speeds, self._times, strict=True)
        ]
        self.least = 1 / sum(rates)
        """A lower bound on the seconds of any split's longest stage."""

    def solve(self, bound: float) -> tuple[tuple[Stage, ...], float, float] | None:
        """Return the stages with the least sum of seconds, that sum, and their longest seconds.

        No stage takes longer than `bound`; None if no such stages fit.
        """
        # By layer: the least seconds of the stages from this layer on, and their number of ranks.
        best = np.full(self._size + 1, np.inf)
        best[-1] = 0.0
        ranks_after = np.zeros(self._size + 1)
        choices: list[tuple[np.ndarray, dict[int, list[np.ndarray]]]] = []
        for place in reversed(range(len(self._order))):
            chosen = np.zeros(self._size + 1, int)  # the group's number of stages; 0: none
            new_best = best.copy()
            new_ranks_after = ranks_after.copy()
            ends: dict[int, list[np.ndarray]] = {}
            # By the last chunks of the group's ranks, which several numbers of stages may share.
            solved: dict[tuple[tuple[int, int], ...], _Solved] = {(): (best, ranks_after, [])}
            for number in _stage_counts(len(self._order[place]), self._size):
                chunks = _chunks(len(self._order[place]), number)
                for first in reversed(range(number)):
                    last = tuple(chunks[first:])
                    if last not in solved:
                        solved[last] = self._stage(place, last, solved[last[1:]], bound)
                sums, ranks, ends[number] = solved[tuple(chunks)]
                is_better = sums < new_best
                chosen[is_better] = number
                new_best[is_better] = sums[is_better]
                new_ranks_after[is_better] = ranks[is_better]
            best = new_best
            ranks_after = new_ranks_after
            choices.append((chosen, ends))
        if not np.isfinite(best[0]):
            return None
        stages, longest = self._trace(choices[::-1])
        return stages, float(best[0]), longest

    def _stage(
        self, place: int, chunks: Sequence[tuple[int, int]], solved: _Solved, bound: float
    ) -> _Solved:
        """Put the stage of a group's first chunk of ranks before the solved stages of the others.

        Its matrices have the seconds of the stage and all that follow it.
        """
        best, ranks_after, ends = solved
        begin, end = chunks[0]
        ranks = end - begin
        job = self._job
        kind = job.ranks[self._order[place][0]].kind
        speed = sum(self._speeds[place][begin:end])
        spare, columns = self._spare(place, begin, end)
        times = self._times[place]
        longest_sec = bound * speed
        busy, latency = self._hops(place, (begin, end), is_last=len(chunks) == 1)
        # By the layer after the stage: the seconds of sending and of the stages that follow, and
        # the number of micro-batches whose activations the stage keeps at once.
        after_sec = 2 * (busy + latency * (busy > 0)) + best
        after_sec[busy > bound] = np.inf
        in_flight = np.ceil((ranks + ranks_after) / ranks)
        in_flight = np.minimum(in_flight, math.ceil(self._count / ranks))
        after_sec = _by_length(after_sec)
        in_flight = _by_length(in_flight)
        # Seconds per byte to sum the replicas' gradients.
        sum_sec = job.hop(kind, kind, 2 * (ranks - 1) / ranks).busy_sec if ranks > 1 else 0.0
        sums = np.full(self._size + 1, np.inf)
        next_layer = np.zeros(self._size + 1, int)
        for row in range(0, self._size, _BLOCK_ROWS):
            rows = slice(row, row + _BLOCK_ROWS)
            width = _width(times[rows, : min(columns, self._size - row)] <= longest_sec)
            if not width:
                continue
            block = rows, slice(0, width)
            cost = times[block] * (ranks / speed)
            cost += after_sec[block]
            if sum_sec:
                cost += self._trained[block] * sum_sec
            exceeds_memory = in_flight[block] * self._kept[block] > spare[block]
            cost[exceeds_memory | (times[block] > longest_sec)] = np.inf
            shortest = cost.argmin(axis=1)
            numbers = np.arange(len(shortest))
            sums[rows][: len(numbers)] = cost[numbers, shortest]
            next_layer[rows][: len(numbers)] = row + numbers + 1 + shortest
        return sums, ranks_after[next_layer] + ranks, [next_layer, *ends]

    def _spare(self, place: int, begin: int, end: int) -> tuple[np.ndarray, int]:
        """Return the bytes that some ranks of a group have for activations, and the most layers.

        The bytes are a matrix, with -1 where the stage's parameters alone do not fit; no stage of
        more layers than the second result fits.
        """
        facts = [self._job.ranks[rank] for rank in self._order[place][begin:end]]
        budget = min(rank.memory_bytes - rank.base_bytes for rank in facts)
        budget -= BUCKET_BYTES * (len(facts) > 1)
        at_once = any(rank.steps_at_once for rank in facts)
        if (place, budget, at_once) not in self._spares:
            optimizer_bytes = self._trained if at_once else TEMPORARIES * self._largest
            spare = budget - self._owned - self._largest - self._transit
            times = self._times[place]
            is_refused = (times <= 0) | np.isinf(times)
            spare[is_refused | (self._owned + optimizer_bytes > budget)] = -1.0
            self._spares[place, budget, at_once] = spare, _width(spare >= 0)
        return self._spares[place, budget, at_once]

    def _hops(self, place: int, chunk: tuple[int, int], is_last: bool) -> tuple[np.ndarray, float]:
        """Return the busy seconds of the links after a stage, by the next layer; and the latency.

        The group's last stage sends to a later group, whose kind is not known yet: the slowest
        link counts.
        """
        job = self._job
        begin, end = chunk
        ranks = self._order[place][begin:end]
        kind = job.ranks[ranks[0]].kind
        later_kinds = {job.ranks[group[0]].kind for group in self._order[place + 1 :]}
        targets = later_kinds if is_last and later_kinds else {kind}
        hops = [job.hop(kind, target, 1) for target in targets]
        links = len({job.ranks[rank].node for rank in ranks})
        busy = self._outputs * max(hop.busy_sec for hop in hops) / links
        busy[-1] = 0.0
        return busy, max(hop.latency_sec for hop in hops)

    def _trace(
        self, choices: Sequence[tuple[np.ndarray, dict[int, list[np.ndarray]]]]
    ) -> tuple[tuple[Stage, ...], float]:
        """Return the chosen stages, and the seconds of the longest one, or of its messages."""
        layer = 0
        stages = list[Stage]()
        longest = 0.0
        for place, (chosen, ends) in enumerate(choices):
            group = self._order[place]
            number = int(chosen[layer])
            if not number:
                continue
            chunks = _chunks(len(group), number)
            for next_layers, (begin, end) in zip(ends[number], chunks, strict=True):
                next_layer = int(next_layers[layer])
                ranks = tuple(group[begin:end])
                stages.append(Stage(layer, next_layer, ranks, (1.0,) * len(ranks)))
                seconds = self._times[place][layer, next_layer - layer - 1]
                seconds /= sum(self._speeds[place][begin:end])
                busy, _ = self._hops(place, (begin, end), is_last=end == len(group))
                longest = max(longest, float(seconds), float(busy[next_layer]))
                layer = next_layer
        return tuple(stages), longest


def _between(values: Sequence[float] | np.ndarray, past: float = 0.0) -> np.ndarray:
    """Return a matrix whose [i, k] is the sum of values[i : i + k + 1]; `past` beyond the last."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    lengths = np.arange(len(values))
    is_past = lengths[:, None] + lengths[None, :] >= len(values)
    return np.where(is_past, past, np.maximum(_by_length(sums) - sums[:-1, None], 0.0))


def _largest(values: Sequence[float]) -> np.ndarray:
    """Return a matrix whose [i, k] is the largest of values[i : i + k + 1]."""
    largest = np.zeros((len(values), len(values)))
    for begin in range(len(values)):
        largest[begin, : len(values) - begin] = np.maximum.accumulate(values[begin:])
    return largest


def _by_length(by_end: np.ndarray) -> np.ndarray:
    """Return a view whose [i, k] is by_end[i + k + 1]; 0 past the end."""
    count = len(by_end) - 1
    padded = np.concatenate([by_end[1:], np.zeros(count)])
    return np.lib.stride_tricks.sliding_window_view(padded, count)[:count]


def _width(is_allowed: np.ndarray) -> int:
    """Return the number of columns up to the last in which something is allowed."""
    columns = np.flatnonzero(is_allowed.any(axis=0))
    return int(columns[-1]) + 1 if len(columns) else 0


def _stage_counts(ranks: int, layers: int) -> list[int]:
    """Return the numbers of stages to try for a group of ranks."""
    counts = range(1, ranks + 1) if ranks <= _ALL_STAGE_COUNTS else _STAGE_COUNTS
    return [count for count in counts if count <= min(ranks, layers)]


def _chunks(ranks: int, number: int) -> list[tuple[int, int]]:
    """Divide ranks evenly; return the begin and end of each chunk."""
    sizes = [ranks // number + (place < ranks % number) for place in range(number)]
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def replan(
    job: PipelineJob, plan: PipelinePlan, work_sec: Sequence[float], steps: int
) -> tuple[list[float], str] | None:
    """Return each rank's slowdown and the reason to change the stages; None if not worth the move.

    Args:
        job: as it was planned for.
        plan: of the current stages.
        work_sec: each rank's measured seconds of computing per step.
        steps: the number of steps left.
    """
    factors = [1.0] * len(job.ranks)
    count = math.ceil(job.global_batch / plan.micro_batch)
    for stage in plan.stages:
        assigned_ranks = stage.micro_batch_ranks(count)
        layers = job.layers[stage.begin : stage.end]
        trained = sum(layer.trained for layer in layers)
        trained_bytes = sum(layer.trained_bytes for layer in layers)
        for rank, seconds in zip(stage.ranks, stage.seconds, strict=True):
            micro_batches = assigned_ranks.count(rank)
            if micro_batches:
                update_sec = job.ranks[rank].update_seconds(trained, trained_bytes)
                planned_sec = micro_batches * seconds + update_sec
                factors[rank] = max(work_sec[rank], 1e-9) / planned_sec
    used = [factors[rank] for stage in plan.stages for rank in stage.ranks]
    if max(used) < _MIN_CHANGE * min(used):
        return None
    measured_ranks = [
        facts.scaled(factor) for facts, factor in zip(job.ranks, factors, strict=True)
    ]
    job = replace(job, ranks=tuple(measured_ranks))
    before = predict(job, plan.stages, plan.micro_batch, plan.ahead).step_sec
    new_plan = plan_pipeline(job)
    if new_plan is None or before < _MIN_GAIN * new_plan.step_sec:
        return None
    most_bytes = sum(layer.weight_bytes + layer.state_bytes for layer in job.layers)
    slowest_sec = max((hop.busy_sec for hop in job.links.values()), default=0.0)  # per byte
    moving_sec = _MOVING_SEC + most_bytes * slowest_sec
    if (before - new_plan.step_sec) * steps <= moving_sec:
        return None
    return factors, f"new stages; predicted step {1e3 * new_plan.step_sec:.0f} ms"
