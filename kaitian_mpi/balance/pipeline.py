"""A pipeline's schedule: the ranks of each micro-batch, and the order of their work."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """The forward or the backward of a micro-batch through a rank's layers."""

    is_forward: bool
    micro_batch: int


@dataclass(frozen=True)
class Stage:
    """A contiguous block of layers, and the ranks that each hold a replica of it."""

    begin: int
    """Index of its first layer."""
    end: int
    """Index after its last layer."""
    ranks: tuple[int, ...]
    """The replicas, which compute different micro-batches."""
    seconds: tuple[float, ...]
    """Each rank's seconds for the forward and backward of a micro-batch."""

    def micro_batch_ranks(self, count: int) -> Sequence[int]:
        """Return the rank of each of `count` micro-batches, so that all ranks end together.

        A larger count extends the sequence and changes nothing in front.
        """
        return _micro_batch_ranks(self, count)


@functools.lru_cache(maxsize=256)
def _micro_batch_ranks(stage: Stage, count: int) -> tuple[int, ...]:
    ends = [(seconds, place) for place, seconds in enumerate(stage.seconds)]
    heapq.heapify(ends)
    ranks = []
    for _ in range(count):
        end, place = ends[0]
        heapq.heapreplace(ends, (end + stage.seconds[place], place))
        ranks.append(stage.ranks[place])
    return tuple(ranks)


def windows(stages: Sequence[Stage], ahead: int) -> list[int]:
    """Return for each stage how many micro-batches may be between their forward and backward.

    With `ahead` 0 and one rank a stage this is 1F1B (Narayanan et al., 2021, "Efficient large-scale
    language model training on GPU clusters"): as many as there are ranks from this stage on. A
    larger window hides the time of sending activations. Windows never grow from stage to stage, so
    the oldest micro-batch can always continue and none waits forever.
    """
    ranks = [len(stage.ranks) for stage in stages]
    last = len(stages) - 1
    return [sum(ranks[number:]) + ahead * (last - number) for number in range(len(stages))]


def schedule(micro_batches: Sequence[int], window: int) -> Iterator[Action]:
    """Yield a rank's actions: before each backward, the forwards that its window permits."""
    forwards = iter(micro_batches)
    next_forward = next(forwards, None)
    for number in micro_batches:
        while next_forward is not None and next_forward < number + window:
            yield Action(True, next_forward)
            next_forward = next(forwards, None)
        yield Action(False, number)


def max_in_flight(micro_batches: Sequence[int], window: int) -> int:
    """Return the most micro-batches whose activations a rank keeps at once."""
    changes = (1 if action.is_forward else -1 for action in schedule(micro_batches, window))
    return max(itertools.accumulate(changes), default=0)


@dataclass(frozen=True)
class PipelinePlan:
    """The stages and micro-batches of a pipeline, with its predicted time and memory."""

    stages: tuple[Stage, ...]
    """In the order of the layers. A rank that is in no stage computes nothing."""
    micro_batch: int
    """The largest number of samples in a micro-batch."""
    ahead: int = 0
    """Additional micro-batches in flight; see `windows`."""
    step_sec: float = 0.0
    """Predicted seconds of a step."""
    bytes_by_rank: tuple[int, ...] = ()
    """Predicted peak of each rank's memory."""

    def first_samples(self, sizes: Sequence[int], ranks: int) -> list[int]:
        """Return the number of samples that each rank reads for the first stage.

        `sizes` are the samples of each micro-batch, and `ranks` the number of ranks.
        """
        samples = [0] * ranks
        for rank, size in zip(self.stages[0].micro_batch_ranks(len(sizes)), sizes, strict=True):
            samples[rank] += size
        return samples


class Hop(NamedTuple):
    """The time to send a micro-batch to the next stage; the same in both directions."""

    latency_sec: float
    busy_sec: float
    """Seconds during which the link carries nothing else."""


def simulate(
    stages: Sequence[Stage], hops: Sequence[Hop], count: int, ahead: int, forward: float = 1 / 3
) -> float:
    """Return the seconds of all forwards and backwards of `count` micro-batches.

    `hops` lead from each stage to the next, `ahead` is that of `windows`, and `forward` is the
    forward's fraction of a stage's time.
    """
    return _Simulation(stages, hops, count, ahead, forward).run()


class _Simulation:
    """A discrete-event simulation of a step: a link carries messages in the order sent."""

    def __init__(
        self, stages: Sequence[Stage], hops: Sequence[Hop], count: int, ahead: int, forward: float
    ) -> None:
        self._stages = stages
        self._hops = hops
        self._fractions = (1 - forward, forward)
        self._assigned = [stage.micro_batch_ranks(count) for stage in stages]
        self._links = [[0.0, 0.0] for _ in hops]  # when each is free, backward and forward
        self._arrived: dict[tuple[int, Action], float] = {}  # by stage
        self._left: dict[int, list[Action]] = {}
        self._seconds: dict[int, float] = {}
        self._free: dict[int, float] = {}
        self._number: dict[int, int] = {}
        self._ends: list[tuple[float, int]] = []
        for number, (stage, window) in enumerate(zip(stages, windows(stages, ahead), strict=True)):
            rank_micro_batches: dict[int, list[int]] = {rank: [] for rank in stage.ranks}
            for micro_batch, rank in enumerate(self._assigned[number]):
                rank_micro_batches[rank].append(micro_batch)
            for rank, seconds in zip(stage.ranks, stage.seconds, strict=True):
                self._left[rank] = list(schedule(rank_micro_batches[rank], window))[::-1]
                self._seconds[rank] = seconds
                self._free[rank] = 0.0
                self._number[rank] = number
        for micro_batch in range(count):
            self._arrived[0, Action(True, micro_batch)] = 0.0

    def run(self) -> float:
        for rank in self._stages[0].ranks:
            self._begin(rank)
        end = 0.0
        while self._ends:
            end, rank = heapq.heappop(self._ends)
            action = self._left[rank].pop()
            self._free[rank] = end
            self._send(self._number[rank], action, end)
            self._begin(rank)
        assert not any(self._left.values()), "some micro-batches wait forever"
        return end

    def _begin(self, rank: int) -> None:
        """Begin a rank's next action, if the arrival time of its input is known."""
        if left := self._left[rank]:
            arrived = self._arrived.pop((self._number[rank], left[-1]), None)
            if arrived is not None:
                begin = max(self._free[rank], arrived)
                seconds = self._seconds[rank] * self._fractions[left[-1].is_forward]
                heapq.heappush(self._ends, (begin + seconds, rank))

    def _send(self, number: int, action: Action, end: float) -> None:
        is_forward, micro_batch = action
        target = number + (1 if is_forward else -1)
        if target < 0:
            return
        if target == len(self._stages):
            self._arrived[number, Action(False, micro_batch)] = end
            return
        hop = self._hops[min(number, target)]
        link = self._links[min(number, target)]
        link[is_forward] = max(link[is_forward], end) + hop.busy_sec
        self._arrived[target, action] = link[is_forward] + hop.latency_sec
        receiver = self._assigned[target][micro_batch]
        if self._left[receiver] and self._left[receiver][-1] == action:
            self._begin(receiver)
