"""A pipeline's schedule: who computes which micro-batch of which layers, in which order."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """A rank's next work: the forward or the backward of a micro-batch through its layers."""

    is_forward: bool
    micro_batch: int


@dataclass(frozen=True)
class Stage:
    """Consecutive layers, and the ranks that compute them: each has all of them."""

    begin: int
    end: int
    """Those before this one."""
    ranks: tuple[int, ...]
    """Each takes micro-batches of its own."""
    seconds: tuple[float, ...]
    """Of each rank, for the forward and backward of a micro-batch."""

    def takers(self, count: int) -> Sequence[int]:
        """Return which rank takes each of so many micro-batches, so that all end together.

        The first ones do not depend on how many there are.
        """
        return _takers(self, count)


@functools.lru_cache(maxsize=256)
def _takers(stage: Stage, count: int) -> tuple[int, ...]:
    ends = [(seconds, place) for place, seconds in enumerate(stage.seconds)]
    heapq.heapify(ends)
    takers = []
    for _ in range(count):
        end, place = ends[0]
        heapq.heapreplace(ends, (end + stage.seconds[place], place))
        takers.append(stage.ranks[place])
    return tuple(takers)


def windows(stages: Sequence[Stage], ahead: int) -> list[int]:
    """Return by stage how many micro-batches may be between its forward and its backward.

    With `ahead` 0 and one rank a stage this is 1F1B (Narayanan et al., 2021, "Efficient large-scale
    language model training on GPU clusters"): as many as there are ranks from this stage on. More
    hide the time in which activations travel. They never grow from stage to stage: so whatever the
    number of ranks, the oldest micro-batch can always go on, and none waits forever.
    """
    ranks, after = [len(stage.ranks) for stage in stages], len(stages) - 1
    return [sum(ranks[number:]) + ahead * (after - number) for number in range(len(stages))]


def order(own: Sequence[int], window: int) -> Iterator[Action]:
    """Yield a rank's actions for its micro-batches: before a backward, what is in its window."""
    ahead = iter(own)
    waiting = next(ahead, None)
    for number in own:
        while waiting is not None and waiting < number + window:
            yield Action(True, waiting)
            waiting = next(ahead, None)
        yield Action(False, number)


def most_kept(own: Sequence[int], window: int) -> int:
    """Return of how many micro-batches a rank keeps the activations at once."""
    steps = (1 if action.is_forward else -1 for action in order(own, window))
    return max(itertools.accumulate(steps), default=0)


@dataclass(frozen=True)
class PipelinePlan:
    """Which ranks compute which layers, in which micro-batches, and what that takes."""

    stages: tuple[Stage, ...]
    """From the first layer to the last. A rank in none of them computes nothing."""
    micro_batch: int
    """The most samples of a micro-batch."""
    ahead: int = 0
    """As in `windows`."""
    step_sec: float = 0.0
    """Predicted seconds of a step."""
    bytes_by_rank: tuple[int, ...] = ()
    """Predicted peak of each rank's memory."""

    def first_samples(self, sizes: Sequence[int], ranks: int) -> list[int]:
        """Return by rank how many samples of micro-batches of these sizes it reads first."""
        takers = self.stages[0].takers(len(sizes))
        return [
            sum(size for size, taker in zip(sizes, takers, strict=True) if taker == rank)
            for rank in range(ranks)
        ]


class Hop(NamedTuple):
    """What a micro-batch takes from one stage to the next, the same forwards and back."""

    latency_sec: float
    busy_sec: float
    """While the link carries nothing else."""


def simulate(
    stages: Sequence[Stage], hops: Sequence[Hop], count: int, ahead: int, forward: float = 1 / 3
) -> float:
    """Return the seconds of all forwards and backwards of so many micro-batches.

    `hops` are from each stage to the next, `ahead` as in `windows`, and `forward` is the part of a
    stage's time that its forward takes.
    """
    return _Simulation(stages, hops, count, ahead, forward).run()


class _Simulation:
    """Ends actions in the order of their times, as links carry what is sent first."""

    def __init__(
        self, stages: Sequence[Stage], hops: Sequence[Hop], count: int, ahead: int, forward: float
    ) -> None:
        self._stages = stages
        self._hops = hops
        self._parts = (1 - forward, forward)
        self._takers = [stage.takers(count) for stage in stages]
        self._links = [[0.0, 0.0] for _ in hops]  # when each is free, back and forwards
        self._arrived: dict[tuple[int, Action], float] = {}  # by stage
        self._left: dict[int, list[Action]] = {}
        self._seconds: dict[int, float] = {}
        self._free: dict[int, float] = {}
        self._number: dict[int, int] = {}
        self._ends: list[tuple[float, int]] = []
        for number, (stage, window) in enumerate(zip(stages, windows(stages, ahead), strict=True)):
            own: dict[int, list[int]] = {rank: [] for rank in stage.ranks}
            for micro_batch, taker in enumerate(self._takers[number]):
                own[taker].append(micro_batch)
            for rank, seconds in zip(stage.ranks, stage.seconds, strict=True):
                self._left[rank] = [*order(own[rank], window)][::-1]
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
        """Begin a rank's next action, if what it needs has a time of arrival."""
        if left := self._left[rank]:
            arrived = self._arrived.pop((self._number[rank], left[-1]), None)
            if arrived is not None:
                begin = max(self._free[rank], arrived)
                seconds = self._seconds[rank] * self._parts[left[-1].is_forward]
                heapq.heappush(self._ends, (begin + seconds, rank))

    def _send(self, number: int, action: Action, end: float) -> None:
        is_forward, micro_batch = action
        target = number + (1 if is_forward else -1)
        if target < 0:
            return
        if target == len(self._stages):
            self._arrived[number, Action(False, micro_batch)] = end
            return
        hop, link = self._hops[min(number, target)], self._links[min(number, target)]
        link[is_forward] = max(link[is_forward], end) + hop.busy_sec
        self._arrived[target, action] = link[is_forward] + hop.latency_sec
        taker = self._takers[target][micro_batch]
        if self._left[taker] and self._left[taker][-1] == action:
            self._begin(taker)
