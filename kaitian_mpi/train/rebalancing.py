"""Adjusts the plan to the ranks' speeds while they train, and reports slow ranks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kaitian_mpi.balance.cost_learner import MAX_GROWTH, CostLearner
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.monitor import RankSteps
from kaitian_mpi.balance.rebalancer import Rebalancer
from kaitian_mpi.balance.stragglers import SlowPeriod, StragglerDetector
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.step import Step, StepObserver, StepReports


class Balancing(StepObserver):
    """Tracks every rank's speed; all ranks reach the same decisions from the same reports."""

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        batch_sizes: list[int],
        costs: list[RankCost] | None,
        adaptive: bool,
        *,
        set_plan: Callable[[list[int]], None],
        own_steps_ahead: int = 0,
        steps_ahead: int = 0,
        min_batch: int = 1,
        has_micro_batches: bool = True,
        sinks: Sinks | None = None,
    ) -> None:
        """Start with a plan. All ranks apply a new one at the same step, `steps_ahead` later.

        Without costs they are learned first. `own_steps_ahead` are the steps for which this rank
        fetches batches in advance; without micro-batches, batches grow only step by step.
        """
        self._sinks = sinks or Sinks()
        self._world, self._folder, self._steps_ahead = world, folder, steps_ahead
        self._min_batch, learns = min_batch, adaptive and not costs
        self._learner = CostLearner(batch_sizes, min_batch, steps_ahead) if learns else None
        self._max_growth = math.inf if has_micro_batches else MAX_GROWTH
        self._rebalancer = self._make_rebalancer(costs, batch_sizes) if adaptive and costs else None
        self._stragglers = StragglerDetector(world.size, costs or ())
        self.plans = 1
        self._set_plan, self._delay = set_plan, steps_ahead - own_steps_ahead
        self._waiting: list[tuple[int, list[int]]] = []

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Apply the plans that are due after this step."""
        plan = None if reports is None else self.observe(step.number, reports)
        if plan is not None:
            self._waiting.append((step.number + self._delay, plan))
        self._apply_plans(step.number)

    def epoch_ends(self) -> None:
        """Apply all plans: no batch of the next epoch is fetched yet."""
        self._apply_plans(math.inf)

    def _apply_plans(self, step: float) -> None:
        while self._waiting and self._waiting[0][0] <= step:
            self._set_plan(self._waiting.pop(0)[1])

    def observe(self, step: int, reports: StepReports) -> list[int] | None:
        """Add the reports of the step before; return new batch sizes if they are worth it."""
        steps = _rank_steps(reports)
        if self._learner is not None:
            return self._learn(step, self._learner, steps)
        for change in self._stragglers.observe(step - 1, steps, reports.data_sec):
            self._report_slow(step, change)
        plan = self._rebalancer.observe(steps) if self._rebalancer else None
        if plan is None:
            return None
        reason = f"{self._world.infos[plan.rank]} {plan.reason}"
        self._record(step, plan.batch_sizes, reason, plan.gain, plan.factors)
        return plan.batch_sizes

    def slow_ranks(self) -> list[dict[str, Any]]:
        """Return which ranks were slow and why, for the summary."""
        found = []
        for slow in self._stragglers.found:
            info = self._world.infos[slow.rank]
            where = {"host": info.host, "device": info.device, "device_kind": info.kind}
            found.append({**dataclasses.asdict(slow), "rank": info.world_rank, **where})
        return found

    def costs(self) -> list[RankCost] | None:
        """Return each rank's cost as estimated from its steps; None if unknown."""
        return self._rebalancer.costs if self._rebalancer else None

    def _learn(self, step: int, learner: CostLearner, steps: RankSteps) -> list[int] | None:
        """Learn the costs; rebalancing and straggler detection start when they are known."""
        batch_sizes, reason = learner.observe(steps), "learning what a step costs"
        if learner.costs is not None:
            reason = f"from what the first {learner.steps} steps cost"
            self._rebalancer = self._make_rebalancer(learner.costs, learner.batch_sizes)
            self._stragglers = StragglerDetector(self._world.size, learner.costs)
            self._learner = None
        if batch_sizes is not None:
            self._record(step, batch_sizes, reason, learner.gain, [1.0] * self._world.size)
        return batch_sizes

    def _make_rebalancer(self, costs: list[RankCost], batch_sizes: list[int]) -> Rebalancer:
        return Rebalancer(costs, batch_sizes, self._min_batch, self._max_growth)

    def _record(
        self, step: int, batch_sizes: list[int], reason: str, gain: float, factors: list[float]
    ) -> None:
        self.plans += 1
        ranks = [info.world_rank for info in self._world.infos]
        plan: dict[str, Any] = {"batch_sizes": batch_sizes, "reason": reason}
        plan["predicted_gain"] = round(gain, 4)
        line = {
            "step": step + self._steps_ahead,
            "decided_at_step": step,
            "time": time.time(),
            "ranks": ranks,
            **plan,
            "compute_time_factors": [round(factor, 3) for factor in factors],
        }
        self._folder.append("plan.jsonl", line)
        text = f"step {step}: new plan {batch_sizes}: {reason}"
        print_rank_0(self._world, text)
        self._sinks.event("plan", step, text, ranks, **plan)

    def _report_slow(self, step: int, slow: SlowPeriod) -> None:
        """Log that a rank has become slow, or is not any more."""
        info = self._world.infos[slow.rank]
        if slow.until_step is None:
            kind, show = "slow", warn_rank_0
            what = f"has been slow since step {slow.since_step} ({slow.kind}): {slow.text}"
        else:
            kind, show = "slow_end", print_rank_0
            what = f"recovered ({slow.kind}, slow since step {slow.since_step})"
        text = f"step {step}: {info} {what}"
        show(self._world, text)
        since = {"since_step": slow.since_step, "until_step": slow.until_step}
        self._sinks.event(kind, step, text, [info.world_rank], cause=slow.kind, **since)


def _rank_steps(reports: StepReports) -> RankSteps:
    """Convert reports; getting the batch counts as the rank's own work, like computing."""
    counts = np.maximum(reports.timed_steps, 1)
    return RankSteps(
        reports.timed_steps,
        reports.samples,
        reports.computed_sec / counts + reports.data_sec,
        reports.waited_sec / counts,
    )
