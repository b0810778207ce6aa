"""Straggler detection: which rank is slow, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kaitian_mpi.balance import portable_math
from kaitian_mpi.balance.cost_model import CostTable, RankCost
from kaitian_mpi.balance.rebalancer import RankSteps, SpeedMonitors

COMPUTE = "compute"
DATA = "data loading"
COMMUNICATION = "communication"

_WARM_UP_STEPS = 2
_BASELINE_STEPS = 10
_WINDOW = 5
_MEDIAN_OF = 3
_PERSISTS = 5
# Steps from the first slow one, with a median of three; six with a median of five.
_NOTICED_AFTER = 5
# A rank is slow above the first value, and has recovered below the second.
_SLOW_FACTORS = (1.25, 1.12)
_LARGE_FRACTIONS = (0.20, 0.10)


@dataclass(frozen=True)
class SlowPeriod:
    """A period in which a rank is, or was, slow for one reason."""

    rank: int
    kind: str
    """`compute`, `data loading` or `communication`."""
    since_step: int
    amount: float
    """For compute, the slowdown relative to before or to the others; else a fraction of the
    step."""
    text: str
    until_step: int | None = None
    """None while it lasts."""


class StragglerDetector:
    """Finds slow ranks from the step times that all ranks exchange, the same on every rank.

    - compute: a rank takes at least 1.25 times as long for its share as in its first ten steps
      (scaled by its cost model if the share has changed), or 1.25 times as long per step as the
      median of the other ranks, which wait for it;
    - data loading: a rank waits for its batch for at least a fifth of the step;
    - communication: even the rank that waits least waits for at least a fifth of the step, so this
      is the communication itself. It is attributed to that rank, which arrives last.
    """

    def __init__(self, ranks: int, costs: Sequence[RankCost] = ()) -> None:
        """Start without any steps; `costs` are needed only if the shares change."""
        self._costs = CostTable.from_costs(costs or [RankCost(0.0, 1.0)] * ranks)
        self._steps = 0
        self._work: deque[np.ndarray] = deque(maxlen=_MEDIAN_OF)
        self._data: deque[np.ndarray] = deque(maxlen=_WINDOW)
        self._wait: deque[np.ndarray] = deque(maxlen=_WINDOW)
        self._first_ratios: list[np.ndarray] = []
        self._baseline: np.ndarray | None = None
        self._monitors = SpeedMonitors(ranks)
        self.periods: list[SlowPeriod] = []
        """All slow periods so far, ended or not, in the order they were found."""
        self._slow_compute = _Watch(COMPUTE, ranks, _SLOW_FACTORS, self.periods)
        self._slow_data = _Watch(DATA, ranks, _LARGE_FRACTIONS, self.periods)
        self._slow_communication = _Watch(COMMUNICATION, 1, _LARGE_FRACTIONS, self.periods)

    def observe(self, step: int, steps: RankSteps, data_sec: np.ndarray) -> list[SlowPeriod]:
        """Add a step's times of all ranks; return the slow periods that start or end with it.

        `data_sec` is each rank's share of its `work_sec` spent getting the batch.
        """
        self._steps += 1
        if self._steps <= _WARM_UP_STEPS or not (steps.steps.all() and steps.samples.all()):
            return []
        self._work.append(np.maximum(steps.work_sec, 1e-9))
        self._data.append(data_sec)
        self._wait.append(steps.wait_sec)
        self._compare_with_first(steps, data_sec)
        work, data, wait = map(_medians, (self._work, self._data, self._wait))
        step_sec = np.maximum(work + wait, 1e-9)
        slower = portable_math.exp(self._monitors.log_factors)
        versus = _versus_others(work)
        data_fractions = np.minimum(data / step_sec, 1)
        last = int(wait.argmin())
        waits = wait[last] / step_sec[last]

        def compute_text(rank: int) -> str:
            if slower[rank] >= versus[rank]:
                return f"it computes {slower[rank]:.2f}x as long as in its first steps"
            return f"it takes {versus[rank]:.2f}x as long as the others, which wait for it"

        def data_text(rank: int) -> str:
            fraction = data_fractions[rank]
            return f"it waits for data {fraction:.0%} of each step; more --workers may help"

        def communication_text(rank: int) -> str:
            return f"even the last rank to arrive waits {waits:.0%} of each step for the gradients"

        return [
            *self._slow_compute.follow(step, np.maximum(slower, versus), compute_text),
            *self._slow_data.follow(step, data_fractions, data_text),
            *self._slow_communication.follow(step, np.array([waits]), communication_text, last),
        ]

    def _compare_with_first(self, steps: RankSteps, data_sec: np.ndarray) -> None:
        work = np.maximum(steps.work_sec - data_sec, 1e-9)
        ratios = work / self._costs.seconds(steps.samples)
        if self._baseline is not None:
            self._monitors.observe(ratios / self._baseline, steps.steps > 0)
            return
        self._first_ratios.append(ratios)
        if len(self._first_ratios) == _BASELINE_STEPS:
            self._baseline = _medians(self._first_ratios)


class _Watch:
    """Tracks which ranks are slow for one reason, with hysteresis."""

    def __init__(
        self, kind: str, ranks: int, limits: tuple[float, float], periods: list[SlowPeriod]
    ) -> None:
        self._kind = kind
        self._periods = periods
        self._high, self._low = limits
        self._current: dict[int, SlowPeriod] = {}
        self._steps_different = np.zeros(ranks, int)  # consecutive steps in the other state

    def follow(
        self, step: int, amounts: np.ndarray, text: Callable[[int], str], offset: int = 0
    ) -> list[SlowPeriod]:
        """Return the periods that start or end now, after the change has persisted for some steps.

        `offset` is the rank of the first amount.
        """
        differs = amounts >= self._high
        slow = list(self._current)
        differs[slow] = amounts[slow] < self._low
        self._steps_different = np.where(differs, self._steps_different + 1, 0)
        persistent = np.flatnonzero(self._steps_different >= _PERSISTS)
        self._steps_different[persistent] = 0
        changed = []
        for index in persistent.tolist():
            period = self._current.pop(index, None)
            if period is None:
                rank = index + offset
                since = max(1, step - _NOTICED_AFTER)
                period = SlowPeriod(rank, self._kind, since, float(amounts[index]), text(rank))
                self._current[index] = period
                self._periods.append(period)
            else:
                place = self._periods.index(period)
                period = self._periods[place] = replace(period, until_step=step)
            changed.append(period)
        return changed


def _medians(rows: Sequence[np.ndarray]) -> np.ndarray:
    ordered = np.sort(np.array(rows), axis=0)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _versus_others(works: np.ndarray) -> np.ndarray:
    """Return each rank's time relative to the median of the others' times; 1 for a single rank."""
    others = len(works) - 1
    if others == 0:
        return np.ones(1)
    order = np.argsort(works, kind="stable")
    ordered = works[order]
    place = np.empty_like(order)
    place[order] = np.arange(len(works))
    # Leaving out a rank moves those after it in this order up by one.
    low, high = ((index + (place <= index)) for index in ((others - 1) // 2, others // 2))
    return works / ((ordered[low] + ordered[high]) / 2)
