"""Straggler detection: which rank is slow, and why."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.cost_table import CostTable
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.balance.monitor import SpeedMonitors
from kaitian_mpi.balance.rank_steps import RankSteps

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
        self._times = _Times(costs or [per_sample] * ranks)
        self._compute, self._data = _Watch(COMPUTE, ranks), _Watch(DATA, ranks)
        self._communication = _Watch(COMMUNICATION, ranks)
        self.found: list[SlowPeriod] = []
        """All slow periods so far, ended or not, in the order they were found."""

    def observe(self, step: int, steps: RankSteps, data_sec: np.ndarray) -> list[SlowPeriod]:
        """Add a step's times of all ranks; return the slow periods that start or end with it.

        Args:
            step: the step's number.
            steps: of the ranks.
            data_sec: the part of each rank's `work_sec` spent getting the batch.
        """
        self._step += 1
        if self._step <= _WARM_UP_STEPS or not (steps.steps.all() and steps.samples.all()):
            return []
        self._times.add(steps, data_sec)
        return [
            *self._follow_compute(step),
            *self._follow_data(step),
            *self._follow_communication(step),
        ]

    def name(self, slow: SlowPeriod, rank: int, text: str) -> SlowPeriod:
        """Set the rank and text of a slow period that has just started."""
        named = replace(slow, rank=rank, text=text)
        watches = (self._compute, self._data, self._communication)
        next(watch for watch in watches if watch.kind == slow.kind).current[slow.rank] = named
        self.found[self.found.index(slow)] = named
        return named

    def _follow_compute(self, step: int) -> list[SlowPeriod]:
        slower = self._times.slower()
        versus_others = _versus_others(self._times.work())

        def text(rank: int) -> str:
            if slower[rank] >= versus_others[rank]:
                return f"it computes {slower[rank]:.2f}x as long as at first"
            return f"it takes {versus_others[rank]:.2f}x as long as the others, which wait for it"

        amounts = np.maximum(slower, versus_others)
        return self._follow(self._compute, step, amounts, _SLOW_FACTOR, _RECOVERED_FACTOR, text)

    def _follow_data(self, step: int) -> list[SlowPeriod]:
        parts = self._times.data() / np.maximum(self._times.step(), 1e-9)

        def text(rank: int) -> str:
            return f"it waits for data {parts[rank]:.0%} of each step; more --workers may help"

        return self._follow(self._data, step, parts, _LARGE_PART, _SMALL_PART, text)

    def _follow_communication(self, step: int) -> list[SlowPeriod]:
        waits = self._times.wait()
        last = next(iter(self._communication.current), int(waits.argmin()))
        part = waits.min() / max(self._times.step()[last], 1e-9)

        def text(rank: int) -> str:
            return f"even the last rank to arrive waits {part:.0%} of each step for the gradients"

        amounts = np.full(len(waits), part)
        only = np.arange(len(waits)) == last
        watch = self._communication
        return self._follow(watch, step, amounts, _LARGE_PART, _SMALL_PART, text, only)

    def _follow(
        self,
        watch: _Watch,
        step: int,
        amounts: np.ndarray,
        high: float,
        low: float,
        text: Callable[[int], str],
        only: np.ndarray | None = None,
    ) -> list[SlowPeriod]:
        """Return the periods that start or end now: only what has persisted for some steps."""
        changes = []
        for rank in watch.persistent(amounts, high, low, only):
            known = watch.current.pop(rank, None)
            if known is None:
                begun = SlowPeriod(
                    rank,
                    watch.kind,
                    max(1, step - _NOTICED_AFTER),
                    float(amounts[rank]),
                    text(rank),
                )
                watch.current[rank] = begun
                self.found.append(begun)
                changes.append(begun)
            else:
                ended = replace(known, until_step=step)
                self.found[self.found.index(known)] = ended
                changes.append(ended)
        return changes


class _Watch:
    """Which ranks are slow for one reason, and which seem to become so or to recover."""

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind = kind
        self.current: dict[int, SlowPeriod] = {}
        """The periods that last, by the rank they began with."""
        self._signs = np.zeros(ranks, int)

    def persistent(
        self, amounts: np.ndarray, high: float, low: float, only: np.ndarray | None
    ) -> list[int]:
        """Add a step; return the ranks that now are slow, or no longer are, for long enough.

        Args:
            amounts: how slow each rank is.
            high: a rank is slow from this amount on.
            low: a slow rank has recovered below this amount.
            only: the ranks that the step says something about; None for all.
        """
        sign = amounts >= high
        known = list(self.current)
        sign[known] = amounts[known] < low
        signs = np.where(sign, self._signs + 1, 0)
        self._signs = signs if only is None else np.where(only, signs, self._signs)
        found = np.flatnonzero(self._signs >= _PERSISTS)
        self._signs[found] = 0
        ranks: list[int] = found.tolist()
        return ranks


class _Times:
    """The times of the ranks' last steps; each array has one entry per rank."""

    def __init__(self, costs: Sequence[RankCost]) -> None:
        self._costs = CostTable.of(costs)
        self._works = _Newest(_MEDIAN_OF)
        self._datas, self._waits = _Newest(_WINDOW), _Newest(_WINDOW)
        self._first = _Newest(_BASELINE_STEPS)
        self._baseline: np.ndarray | None = None
        self._monitors = SpeedMonitors(len(costs))

    def add(self, steps: RankSteps, data_sec: np.ndarray) -> None:
        self._works.add(steps.work_sec)
        self._datas.add(data_sec)
        self._waits.add(steps.wait_sec)
        work = np.maximum(steps.work_sec - data_sec, 1e-9)
        ratios = work / self._costs.seconds(steps.samples)
        if self._baseline is not None:
            self._monitors.observe(ratios / self._baseline)
            return
        self._first.add(ratios)
        if self._first.is_full:
            self._baseline = self._first.medians()

    def slower(self) -> np.ndarray:
        return np.array([math.exp(log) for log in self._monitors.log_factors.tolist()])

    def work(self) -> np.ndarray:
        return self._works.medians()

    def data(self) -> np.ndarray:
        return self._datas.medians()

    def wait(self) -> np.ndarray:
        return self._waits.medians()

    def step(self) -> np.ndarray:
        return self.work() + self.wait()


class _Newest:
    """The newest rows, at most so many."""

    def __init__(self, most: int) -> None:
        self._rows: deque[np.ndarray] = deque(maxlen=most)

    @property
    def is_full(self) -> bool:
        return len(self._rows) == self._rows.maxlen

    def add(self, row: np.ndarray) -> None:
        self._rows.append(row)

    def medians(self) -> np.ndarray:
        """Return the median of each column."""
        ordered = np.array(self._rows)
        ordered.sort(axis=0)
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _versus_others(works: np.ndarray) -> np.ndarray:
    """Return each rank's time relative to the median of the others' times; 1 for a single rank."""
    others = len(works) - 1
    if others == 0:
        return np.ones(1)
    order = np.argsort(works, kind="stable")
    ordered, place = works[order], np.empty_like(order)
    place[order] = np.arange(len(works))
    # Without a rank, those behind it in this order move up by one.
    low, high = ((index + (place <= index)) for index in ((others - 1) // 2, others // 2))
    return works / ((ordered[low] + ordered[high]) / 2)
