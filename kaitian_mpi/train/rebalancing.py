"""Adjusts the plan to the ranks' speeds while they train, and reports slow ranks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.planner import Planner
from kaitian_mpi.balance.rebalancer import MAX_GROWTH, NewPlan
from kaitian_mpi.balance.stragglers import SlowPeriod, StragglerDetector
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.data.loader import steps_ahead
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports
from kaitian_mpi.train.summary import describe_rank


class Balancing(StepObserver):
    """Tracks every rank's speed; all ranks reach the same decisions from the same reports."""

    def __init__(
        self,
        config: TrainingConfig,
        loop: Loop,
        folder: RunFolder,
        sinks: Sinks,
        follows_speeds: bool = True,
    ) -> None:
        """Start with the loop's plan. Collective.

        All ranks apply a new one at the same step, when every rank has trained the batches that its
        workers have fetched. Without costs they are learned first; without micro-batches, batches
        grow only step by step.
        """
        world = loop.world
        plan = loop.plan
        workers = gather_values(world.comm, loop.shares.workers)
        self.plans = 1
        self._config = config
        self._loop = loop
        self._world = world
        self._folder = folder
        self._sinks = sinks
        self._set_plan = loop.sampler.set_plan
        self._steps_ahead = steps_ahead(max(workers))
        self._delay = self._steps_ahead - steps_ahead(workers[world.rank])
        self._follows_speeds = follows_speeds
        self._stragglers = StragglerDetector(world.size, plan.costs or ())
        self._planner: Planner | None = None
        if config.balance == "adaptive" and (plan.costs or follows_speeds):
            self._planner = Planner(
                plan.batch_sizes,
                world.infos,
                plan.costs,
                plan.min_batch,
                self._steps_ahead,
            )
        self._waiting: list[tuple[int, list[int]]] = []

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        plan = None
        # It does not where ranks compute different parts of the model and wait for each other.
        if reports is not None and self._follows_speeds:
            plan = self.observe(step.number, reports)
        if plan is not None:
            self._waiting.append((step.number + self._delay, plan))
        self._apply_plans(step.number)

    def shares_dropped(self) -> None:
        """Apply all plans, as all ranks load again from the same sample on."""
        self._apply_plans(math.inf)

    def epoch_ends(self) -> None:
        """Apply all plans: no batch of the next epoch is fetched yet."""
        self._apply_plans(math.inf)

    def _apply_plans(self, step: float) -> None:
        while self._waiting and self._waiting[0][0] <= step:
            self._set_plan(self._waiting.pop(0)[1])

    def observe(self, step: int, reports: StepReports) -> list[int] | None:
        """Add the reports of the step before; return new batch sizes if they are worth it."""
        planner = self._planner
        is_learning = planner is not None and planner.costs is None
        if not is_learning:
            for change in self._stragglers.observe(step - 1, reports.times, reports.data_sec):
                self._report_slow(step, change)
        max_growth = math.inf if self._loop.engine.splits_shares else MAX_GROWTH
        plan = planner.observe(reports.times, max_growth) if planner is not None else None
        if is_learning and planner is not None and planner.costs is not None:
            self._stragglers = StragglerDetector(self._world.size, planner.costs)
        if plan is None:
            return None
        self._record(step, plan)
        return plan.batch_sizes

    def slow_ranks(self) -> list[dict[str, Any]]:
        """Return the slow periods of ranks and their causes, for the summary."""
        return [
            {**dataclasses.asdict(slow), **describe_rank(self._world.infos[slow.rank])}
            for slow in self._stragglers.periods
        ]

    def costs(self) -> list[RankCost] | None:
        """Return each rank's cost as estimated from its steps; None if unknown."""
        return self._planner.costs if self._planner is not None else None

    def _record(self, step: int, plan: NewPlan) -> None:
        self.plans += 1
        text = f"step {step}: new plan {plan.batch_sizes}: {plan.reason}"
        print_rank_0(self._world, text)
        record = {
            "batch_sizes": plan.batch_sizes,
            "reason": plan.reason,
            "predicted_gain": round(plan.gain, 4),
        }
        more = {
            "decided_at_step": step,
            "compute_time_factors": [round(factor, 3) for factor in plan.factors],
            "step": step + self._steps_ahead,
        }
        record_plan(self._world, self._folder, self._sinks, step, text, record, more)

    def _report_slow(self, step: int, slow: SlowPeriod) -> None:
        """Report that a rank has become slow, or has recovered."""
        info = self._world.infos[slow.rank]
        if slow.until_step is None:
            kind = "slow"
            show = warn_rank_0
            change = f"has been slow since step {slow.since_step} ({slow.kind}): {slow.text}"
        else:
            kind = "slow_end"
            show = print_rank_0
            change = f"recovered ({slow.kind}, slow since step {slow.since_step})"
        text = self._config.word(f"step {step}: {info} {change}")
        show(self._world, text)
        since = {"since_step": slow.since_step, "until_step": slow.until_step}
        self._sinks.event(kind, step, text, [info.world_rank], cause=slow.kind, **since)


def record_plan(
    world: World,
    folder: RunFolder,
    sinks: Sinks,
    step: int,
    text: str,
    plan: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Record a plan as an event, and with `more` in plan.jsonl."""
    ranks = [info.world_rank for info in world.infos]
    line = {"step": step, "time": time.time(), "ranks": ranks, **plan, **(more or {})}
    folder.append("plan.jsonl", line)
    sinks.event("plan", step, text, ranks, **plan)
