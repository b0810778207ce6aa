"""Straggler detection: which rank is slow, and why."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.balance.monitor import SpeedMonitor
from kaitian_mpi.balance.rebalancer import RankStep

COMPUTE, DATA, COMMUNICATION = "compute", "data loading", "communication"

_WARM_UP_STEPS = 2
_BASELINE_STEPS = 10
_WINDOW = 5
_MEDIAN_OF = 3
_PERSISTS = 5
# Steps from the first slow one, with a median of three; six with a median of five.
_NOTICED_AFTER = 5
# A rank is slow above the first value, and has recovered below the second.
_SLOW_FACTOR, _RECOVERED_FACTOR = 1.25, 1.12
_LARGE_PART, _SMALL_PART = 0.20, 0.10


@dataclass(frozen=True)
class SlowPeriod:
    """A period in which a rank is, or was, slow for one reason."""

    rank: int
    kind: str
    """`compute`, `data loading` or `communication`."""
    since_step: int
    amount: float
    """compute: slowdown relative to before or to the other ranks; else: part of the step."""
    text: str
    until_step: int | None = None
    """None while it lasts."""


class StragglerDetector:
    """Finds slow ranks from the step times that all ranks exchange; every rank finds the same.

    - compute: a rank takes at least 1.25 times as long for its share as in its first ten steps
      (scaled by its cost model if the share has changed), or 1.25 times as long per step as the
      median of the other ranks, which wait for it;
    - data loading: a rank waits for its batch for at least a fifth of the step;
    - communication: even the rank that waits least waits for at least a fifth of the step, so this
      is the communication itself. It is attributed to that rank, which arrives last.
    """

    def __init__(self, ranks: int, costs: Sequence[RankCost] = ()) -> None:
        """Start without any steps.

        Args:
            ranks: the number of ranks.
            costs: of each rank; empty if the shares never change.
        """
        per_sample = RankCost(CostModel(0.0, 1.0))
        self._step = 0
        self._times = [_Times(cost) for cost in costs or [per_sample] * ranks]
        self._current: dict[tuple[str, int], SlowPeriod] = {}
        self._signs: dict[tuple[str, int], int] = {}
        self.found: list[SlowPeriod] = []
        """All slow periods so far, ended or not, in the order they were found."""

    def observe(
        self, step: int, steps: Sequence[RankStep], data_sec: Sequence[float]
    ) -> list[SlowPeriod]:
        """Add a step's times of all ranks; return the slow periods that start or end with it.

        Args:
            step: the step's number.
            steps: of each rank.
            data_sec: the part of each rank's `work_sec` spent getting the batch.
        """
        self._step += 1
        if self._step <= _WARM_UP_STEPS or not all(s.steps and s.samples for s in steps):
            return []
        for times, rank_step, data in zip(self._times, steps, data_sec, strict=True):
            times.add(rank_step, data)
        seen = [*self._compute(), *self._data(), *self._communication()]
        return [change for sign in seen if (change := self._follow(step, *sign)) is not None]

    def name(self, slow: SlowPeriod, rank: int, text: str) -> SlowPeriod:
        """Set the rank and text of a slow period that has just started."""
        named = replace(slow, rank=rank, text=text)
        self._current[slow.kind, slow.rank] = named
        self.found[self.found.index(slow)] = named
        return named

    def _compute(self) -> list[tuple[str, int, float, float, float, str]]:
        works = [times.work for times in self._times]
        signs = []
        for rank, times in enumerate(self._times):
            others = works[:rank] + works[rank + 1 :]
            versus_others = times.work / median(others) if others else 1.0
            slower = times.slower
            text = (
                f"it computes {slower:.2f}x as long as at first"
                if slower >= versus_others
                else f"it takes {versus_others:.2f}x as long as the others, which wait for it"
            )
            amount = max(slower, versus_others)
            signs.append((COMPUTE, rank, amount, _SLOW_FACTOR, _RECOVERED_FACTOR, text))
        return signs

    def _data(self) -> list[tuple[str, int, float, float, float, str]]:
        signs = []
        for rank, times in enumerate(self._times):
            part = times.data / max(times.step, 1e-9)
            text = f"it waits for data {part:.0%} of each step; more --workers may help"
            signs.append((DATA, rank, part, _LARGE_PART, _SMALL_PART, text))
        return signs

    def _communication(self) -> list[tuple[str, int, float, float, float, str]]:
        waits = [times.wait for times in self._times]
        last = next(
            (rank for kind, rank in self._current if kind == COMMUNICATION),
            waits.index(min(waits)),
        )
        part = min(waits) / max(self._times[last].step, 1e-9)
        text = f"even the last rank to arrive waits {part:.0%} of each step for the gradients"
        return [(COMMUNICATION, last, part, _LARGE_PART, _SMALL_PART, text)]

    def _follow(
        self, step: int, kind: str, rank: int, amount: float, high: float, low: float, text: str
    ) -> SlowPeriod | None:
        """Return a slowness that starts or ends now: only one that has persisted for some steps."""
        key = kind, rank
        known = self._current.get(key)
        sign = amount >= high if known is None else amount < low
        self._signs[key] = self._signs.get(key, 0) + 1 if sign else 0
        if self._signs[key] < _PERSISTS:
            return None
        self._signs[key] = 0
        if known is None:
            begun = SlowPeriod(rank, kind, max(1, step - _NOTICED_AFTER), amount, text)
            self._current[key] = begun
            self.found.append(begun)
            return begun
        ended = replace(known, until_step=step)
        del self._current[key]
        self.found[self.found.index(known)] = ended
        return ended


class _Times:
    """The times of one rank's last steps."""

    def __init__(self, cost: RankCost) -> None:
        self._cost = cost
        self._works: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._datas: deque[float] = deque(maxlen=_WINDOW)
        self._waits: deque[float] = deque(maxlen=_WINDOW)
        self._first: list[float] = []
        self._monitor = SpeedMonitor()

    def add(self, step: RankStep, data_sec: float) -> None:
        self._works.append(step.work_sec)
        self._datas.append(data_sec)
        self._waits.append(step.wait_sec)
        ratio = max(step.work_sec - data_sec, 1e-9) / self._cost.seconds(step.samples)
        if len(self._first) < _BASELINE_STEPS:
            self._first.append(ratio)
        else:
            self._monitor.observe(ratio / median(self._first))

    @property
    def slower(self) -> float:
        return math.exp(self._monitor.log_factor)

    @property
    def work(self) -> float:
        return median(self._works)

    @property
    def data(self) -> float:
        return median(self._datas)

    @property
    def wait(self) -> float:
        return median(self._waits)

    @property
    def step(self) -> float:
        return self.work + self.wait
