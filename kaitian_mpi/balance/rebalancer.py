"""Decides during training when to change the batch sizes, and to what."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.fastest_split import CostTable
from kaitian_mpi.balance.monitor import RankSteps, SpeedMonitors
from kaitian_mpi.balance.shares import plan_fastest

_MIN_GAIN = 0.05
_MIN_GAIN_OF_REFINING = 0.02
_STEPS_BETWEEN = 5  # so that a plan is judged by its own steps before it is replaced
_STEPS_TO_REFINE = 10
_WAIT_WINDOW = 10
_STANDARD_ERRORS = 2.5


@dataclass(frozen=True)
class NewPlan:
    """New batch sizes, with their estimated gain and the reason for the change."""

    batch_sizes: list[int]
    gain: float
    """Estimated gain in throughput: 0.5 for 1.5 times the throughput."""
    factors: list[float]
    """Each rank's compute time relative to its cost model."""
    rank: int
    """The rank whose speed has changed most since the previous plan."""
    reason: str
    """How that rank's speed has changed, and the gain."""


class Rebalancer:
    """Tracks the ranks' speeds and proposes a new plan when it gains 5% or more.

    A pure function of values that all ranks have exchanged, so every rank arrives at the same plan
    at the same step. A rank's cost model keeps its shape and is only scaled: alpha and beta cannot
    be separated at a single batch size, and at the fixed point, where each rank's time at its own
    share has been measured, the shape does not matter.

    Noise must not move samples back and forth: the gain has to remain even if every estimate is
    off by 2.5 standard errors towards the values of the current plan. A plan based on little data,
    i.e. on the first steps after a change or on the benchmark, may be refined once, after ten
    steps, for a gain of 2%.
    """

    def __init__(
        self,
        costs: Sequence[RankCost],
        batch_sizes: Sequence[int],
        min_batch: int = 1,
        max_growth: float = math.inf,
    ) -> None:
        """Start from a plan, and the ranks' costs by the benchmark.

        A batch that is computed at once may not fit the memory: so a rank's next one is at most
        `max_growth` times as large as any before.
        """
        self.batch_sizes = list(batch_sizes)
        """The current plan."""
        self._min_batch, self._max_growth = min_batch, max_growth
        self._largest = list(batch_sizes)
        self._costs = CostTable.of(costs)
        self._monitors = SpeedMonitors(len(costs))
        self._planned_logs = np.zeros(len(costs))
        self._waits: deque[float] = deque(maxlen=_WAIT_WINDOW)
        self._steps = 0
        self._refined = False

    @property
    def factors(self) -> list[float]:
        """Each rank's compute time relative to its cost model."""
        return _exponentials(self._monitors.log_factors)

    @property
    def costs(self) -> list[RankCost]:
        """Each rank's estimated cost of a step."""
        return self._scaled(self._monitors.log_factors).costs()

    def observe(self, steps: RankSteps) -> NewPlan | None:
        """Add a step's times of all ranks; return a new plan if it is worth the change, else None.

        A step with other shares than the plan's is ignored: an epoch's last, partial step, or one
        whose batches were fetched before the plan. A plan that is returned becomes the current one.
        """
        if not (steps.samples == self.batch_sizes).all():
            return None
        timed = (steps.steps > 0) & (steps.samples > 0)
        planned_sec = np.where(timed, self._costs.seconds(steps.samples), 1.0)
        self._monitors.observe(np.maximum(steps.work_sec, 1e-9) / planned_sec, timed)
        self._waits.append(float(steps.wait_sec.min()))
        self._steps += 1
        plan = self._better_plan() if self._steps >= _STEPS_BETWEEN else None
        if plan is not None:
            self._adopt(plan)
        return plan

    def _better_plan(self) -> NewPlan | None:
        may_refine = not self._refined and self._steps >= _STEPS_TO_REFINE
        least = _MIN_GAIN_OF_REFINING if may_refine else _MIN_GAIN
        cautious = self._scaled(self._cautious_logs())
        if not self._can_gain(cautious, least):
            return None
        logs = self._monitors.log_factors
        costs = self._scaled(logs)
        batch_sizes = plan_fastest(
            costs.costs(), sum(self.batch_sizes), self._min_batch, self._growth_limits()
        )
        gain = self._gain(batch_sizes, costs)
        if min(gain, self._gain(batch_sizes, cautious)) < least:
            return None
        changes = logs - self._planned_logs
        rank = int(np.abs(changes).argmax())
        times = math.exp(changes[rank])
        reason = f"takes {times:.2f}x as long as planned; {gain:.0%} faster steps predicted"
        return NewPlan(batch_sizes, gain, self.factors, rank, reason)

    def _can_gain(self, costs: CostTable, least: float) -> bool:
        """Return whether any plan could gain as much: after most steps none could.

        To know is much cheaper than to find the best plan.
        """
        longest = self._step_sec(costs, self.batch_sizes) / (1 + least) - median(self._waits)
        # Rounding must not make the answer False.
        total = sum(self.batch_sizes)
        return bool(costs.within(max(0.0, longest) * (1 + 1e-9), total).sum() >= total)

    def _growth_limits(self) -> list[int | None] | None:
        if math.isinf(self._max_growth):
            return None
        fits = self._costs.largest_micro_batch.tolist()
        return [  # what was planned before has fitted
            max(largest, int(min(self._max_growth * largest, fit)))
            for largest, fit in zip(self._largest, fits, strict=True)
        ]

    def _adopt(self, plan: NewPlan) -> None:
        self._refined = plan.gain < _MIN_GAIN
        self.batch_sizes = plan.batch_sizes
        self._largest = list(map(max, self._largest, plan.batch_sizes))
        self._planned_logs = self._monitors.log_factors
        self._steps = 0
        self._monitors.restart()

    def _cautious_logs(self) -> np.ndarray:
        """Return the estimates, each moved by some standard errors towards the planned value."""
        change = self._monitors.log_factors - self._planned_logs
        certain = np.maximum(0.0, np.abs(change) - _STANDARD_ERRORS * self._monitors.log_errors)
        return self._planned_logs + np.copysign(certain, change)

    def _scaled(self, logs: np.ndarray) -> CostTable:
        return self._costs.times(np.array(_exponentials(logs)))

    def _gain(self, batch_sizes: Sequence[int], costs: CostTable) -> float:
        return self._step_sec(costs, self.batch_sizes) / self._step_sec(costs, batch_sizes) - 1

    def _step_sec(self, costs: CostTable, batch_sizes: Sequence[int]) -> float:
        """Return the slowest rank's seconds plus communication: the shortest wait of any rank."""
        return float(costs.seconds(np.array(batch_sizes)).max()) + median(self._waits)


def _exponentials(logs: np.ndarray) -> list[float]:
    """Return the exponentials. Of numpy's, the last bit depends on the processor."""
    return [math.exp(log) for log in logs.tolist()]
