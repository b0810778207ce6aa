"""When to change the plan while training, and to what."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kaitian_mpi.balance.monitor import SpeedMonitor
from kaitian_mpi.balance.optimum import RankCost
from kaitian_mpi.balance.planner import plan_fastest, with_slopes

_LEAST_GAIN = 0.05
_LEAST_GAIN_OF_REFINING = 0.02
_STEPS_BETWEEN = 5  # so that a plan is judged by its own steps before it is replaced
_STEPS_TO_REFINE = 10
_STEPS_OF_WAITING = 10
_STANDARD_ERRORS = 2.5


@dataclass(frozen=True)
class RankStep:
    """What a rank tells of a step; seconds are a step's."""

    steps: int
    """How many steps the seconds are the mean of; 0 where its device has not ended one yet."""
    samples: int
    work_sec: float
    """Getting the batch and computing, without waiting for other ranks."""
    wait_sec: float
    """Only waiting for communication."""


@dataclass(frozen=True)
class NewPlan:
    """Other batch sizes, and what they are good for."""

    batch_sizes: list[int]
    gain: float
    """By how much the steps get shorter by the estimate: 0.5 for 1.5 times the throughput."""
    factors: list[float]
    """How many times as long as its cost model says each rank takes."""
    rank: int
    """The rank whose speed has changed most against what the plan before was made with."""
    why: str
    """What it does, and the gain."""


class Rebalancer:
    """Follows the ranks' speeds and proposes a plan when it pays by 5% or more.

    Pure arithmetic on what all ranks have told each other, so every rank comes to the same plan at
    the same step. A rank's cost model keeps its shape and is scaled: alpha and beta cannot be told
    apart at one batch size, and at the fixed point, where each rank's time at its own share is what
    was measured there, the shape does not matter.

    Noise must not move samples to and fro: the gain has to be there even if every estimate is off
    by 2.5 standard errors towards what the present plan was made with. A plan that was made in
    haste, from the first steps after a change or from the benchmark, may be refined once, from ten
    steps on, for a gain of 2%.
    """

    def __init__(
        self, costs: Sequence[RankCost], batch_sizes: Sequence[int], min_batch: int = 1
    ) -> None:
        """Start from a plan.

        Args:
            costs: of each rank, as the benchmark found them.
            batch_sizes: the plan in force.
            min_batch: the smallest batch that a plan may give.
        """
        self.batch_sizes = list(batch_sizes)
        self._global_batch_size = sum(batch_sizes)
        self._min_batch = min_batch
        self._costs = with_slopes(costs, self._global_batch_size)
        self._monitors = [SpeedMonitor() for _ in costs]
        self._planned_logs = [0.0 for _ in costs]
        self._waits: deque[float] = deque(maxlen=_STEPS_OF_WAITING)
        self._steps = 0
        self._refined = False

    @property
    def factors(self) -> list[float]:
        """How many times as long as its cost model says each rank takes."""
        return [math.exp(monitor.log_factor) for monitor in self._monitors]

    @property
    def costs(self) -> list[RankCost]:
        """What a step costs each rank, by the estimates."""
        return self._scaled([monitor.log_factor for monitor in self._monitors])

    def observe(self, steps: Sequence[RankStep]) -> NewPlan | None:
        """Take in what every rank tells of a step; return a plan that is worth a change, or None.

        A step with other shares than the plan's is left out: an epoch's last, partial one, or one
        whose batches were fetched before the plan. The plan returned is the one in force from then
        on.
        """
        if [step.samples for step in steps] != self.batch_sizes:
            return None
        for monitor, cost, step in zip(self._monitors, self._costs, steps, strict=True):
            if step.steps and step.samples:
                monitor.observe(max(step.work_sec, 1e-9) / cost.seconds(step.samples))
        self._waits.append(min(step.wait_sec for step in steps))
        self._steps += 1
        if self._steps < _STEPS_BETWEEN:
            return None
        plan = self._better_plan()
        if plan is not None:
            self._adopt(plan)
        return plan

    def _better_plan(self) -> NewPlan | None:
        logs = [monitor.log_factor for monitor in self._monitors]
        costs = self._scaled(logs)
        batch_sizes = plan_fastest(costs, self._global_batch_size, self._min_batch)
        if batch_sizes == self.batch_sizes:
            return None
        if self._gain(batch_sizes, self._cautious_logs()) < self._least_gain():
            return None
        gain = self._gain(batch_sizes, logs)
        return NewPlan(batch_sizes, gain, self.factors, *self._reason(logs, gain))

    def _least_gain(self) -> float:
        may_refine = not self._refined and self._steps >= _STEPS_TO_REFINE
        return _LEAST_GAIN_OF_REFINING if may_refine else _LEAST_GAIN

    def _adopt(self, plan: NewPlan) -> None:
        self._refined = plan.gain < _LEAST_GAIN
        self.batch_sizes = plan.batch_sizes
        self._planned_logs = [monitor.log_factor for monitor in self._monitors]
        self._steps = 0
        for monitor in self._monitors:
            monitor.restart()

    def _cautious_logs(self) -> list[float]:
        """Return the estimates, each moved by its standard errors towards the planned one."""
        cautious = []
        for monitor, planned in zip(self._monitors, self._planned_logs, strict=True):
            off = monitor.log_factor - planned
            sure = max(0.0, abs(off) - _STANDARD_ERRORS * monitor.log_error)
            cautious.append(planned + math.copysign(sure, off))
        return cautious

    def _scaled(self, logs: Sequence[float]) -> list[RankCost]:
        return [
            dataclasses.replace(cost, model=cost.model.times(math.exp(log)))
            for cost, log in zip(self._costs, logs, strict=True)
        ]

    def _gain(self, batch_sizes: Sequence[int], logs: Sequence[float]) -> float:
        costs = self._scaled(logs)
        return self._step_sec(costs, self.batch_sizes) / self._step_sec(costs, batch_sizes) - 1

    def _step_sec(self, costs: Sequence[RankCost], batch_sizes: Sequence[int]) -> float:
        """Return the slowest rank's seconds, and the exchange: what the last to come waits."""
        slowest = max(cost.seconds(b) for cost, b in zip(costs, batch_sizes, strict=True))
        return slowest + median(self._waits)

    def _reason(self, logs: Sequence[float], gain: float) -> tuple[int, str]:
        changes = [log - planned for log, planned in zip(logs, self._planned_logs, strict=True)]
        rank = max(range(len(changes)), key=lambda index: abs(changes[index]))
        times = math.exp(changes[rank])
        return rank, f"takes {times:.2f}x as long as planned; {gain:.0%} faster steps predicted"
