"""Adjusts the plan to the ranks' speeds while they train, and reports slow ranks."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np

from kaitian_mpi.balance.cost_learner import MAX_GROWTH, CostLearner
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.balance.rank_steps import RankSteps
from kaitian_mpi.balance.rebalancer import Rebalancer
from kaitian_mpi.balance.stragglers import COMMUNICATION, SlowPeriod, StragglerDetector
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.link_probe import MAX_HOSTS, MIN_HOSTS, end_with_slow_links, time_links
from kaitian_mpi.train.step_exchange import StepReports


class Balancing:
    """Tracks every rank's speed; all ranks reach the same decisions from the same reports."""

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        batch_sizes: list[int],
        costs: list[RankCost] | None,
        adaptive: bool,
        steps_ahead: int = 0,
        min_batch: int = 1,
        has_micro_batches: bool = True,
        sinks: Sinks | None = None,
    ) -> None:
        """Start with a plan.

        Args:
            world: the ranks.
            folder: where plans are written.
            batch_sizes: the plan.
            costs: the ranks' costs; None without a benchmark.
            adaptive: whether to propose new plans; without `costs`, they are learned first.
            steps_ahead: for how many steps batches are fetched in advance, which a new plan cannot
                change.
            min_batch: the smallest batch size in a plan.
            has_micro_batches: whether a batch that does not fit the memory is split; if it is not,
                plans only grow step by step.
            sinks: take the events; None: nothing does.
        """
        self._sinks = sinks or Sinks()
        self._world, self._folder, self._steps_ahead = world, folder, steps_ahead
        self._min_batch, learns = min_batch, adaptive and not costs
        self._learner = CostLearner(batch_sizes, min_batch, steps_ahead) if learns else None
        self._max_growth = math.inf if has_micro_batches else MAX_GROWTH
        self._rebalancer = self._make_rebalancer(costs, batch_sizes) if adaptive and costs else None
        self._stragglers = StragglerDetector(world.size, costs or ())
        self.plans = 1

    def observe(self, step: int, reports: StepReports) -> list[int] | None:
        """Add the ranks' reports of a step; return new batch sizes if they are worth the change.

        Collective: if communication has become slow, the links between hosts are measured.

        Args:
            step: the number of steps done; the reports are of the step before.
            reports: of all ranks.
        """
        steps = _rank_steps(reports)
        if self._learner is not None:
            return self._learn(step, self._learner, steps)
        for change in self._stragglers.observe(step - 1, steps, reports.data_sec):
            self._report_slow(step, self._trace_links(change))
        plan = self._rebalancer.observe(steps) if self._rebalancer else None
        if plan is None:
            return None
        reason = f"{self._world.infos[plan.rank]} {plan.reason}"
        self._record(step, plan.batch_sizes, reason, plan.gain, plan.factors)
        return plan.batch_sizes

    def slow_ranks(self) -> list[dict[str, Any]]:
        """Return which ranks were slow and why, for the summary."""
        return [
            {**dataclasses.asdict(slow), **self._where(slow.rank)}
            for slow in self._stragglers.found
        ]

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

    def _trace_links(self, change: SlowPeriod) -> SlowPeriod:
        """Find the host with slow links, if communication has just become slow.

        Collective: all ranks see the same change at the same step.
        """
        first = {info.host: rank for rank, info in reversed(list(enumerate(self._world.infos)))}
        ends = sorted(first.values())
        begins = change.kind == COMMUNICATION and change.until_step is None
        if not begins or not MIN_HOSTS <= len(ends) <= MAX_HOSTS:
            return change
        found = end_with_slow_links(time_links(self._world.comm, ends))
        if found is None:
            return change
        end, factor = found
        text = f"{change.text}; messages to and from its host take {factor:.1f}x as long as usual"
        return self._stragglers.name(change, ends[end], text)

    def _record(
        self, step: int, batch_sizes: list[int], reason: str, gain: float, factors: list[float]
    ) -> None:
        self.plans += 1
        line = {
            "step": step + self._steps_ahead,
            "decided_at_step": step,
            "time": time.time(),
            "ranks": self._world_ranks,
            "batch_sizes": batch_sizes,
            "reason": reason,
            "predicted_gain": round(gain, 4),
            "compute_time_factors": [round(factor, 3) for factor in factors],
        }
        self._folder.append("plan.jsonl", line)
        text = f"step {step}: new plan {batch_sizes}: {reason}"
        print_rank_0(self._world, text)
        gained: dict[str, Any] = {
            "batch_sizes": batch_sizes,
            "predicted_gain": line["predicted_gain"],
        }
        self._sinks.event("plan", step, text, self._world_ranks, **gained, reason=reason)

    @property
    def _world_ranks(self) -> list[int]:
        return [info.world_rank for info in self._world.infos]

    def _report_slow(self, step: int, slow: SlowPeriod) -> None:
        """Log that a rank has become slow, or is not any more."""
        text = f"step {step}: {self._describe(slow)}"
        kind = "slow" if slow.until_step is None else "slow_end"
        show = warn_rank_0 if kind == "slow" else print_rank_0
        show(self._world, text)
        rank = self._world.infos[slow.rank].world_rank
        since = {"since_step": slow.since_step, "until_step": slow.until_step}
        self._sinks.event(kind, step, text, [rank], cause=slow.kind, **since)

    def _describe(self, slow: SlowPeriod) -> str:
        name = self._world.infos[slow.rank]
        if slow.until_step is not None:
            return f"{name} recovered ({slow.kind}, slow since step {slow.since_step})"
        return f"{name} has been slow since step {slow.since_step} ({slow.kind}): {slow.text}"

    def _where(self, rank: int) -> dict[str, Any]:
        info = self._world.infos[rank]
        return {
            "rank": info.world_rank,
            "host": info.host,
            "device": info.device,
            "device_kind": info.kind,
        }


def _rank_steps(reports: StepReports) -> RankSteps:
    """Convert reports; getting the batch counts as the rank's own work, like computing."""
    counts = np.maximum(reports.timed_steps, 1)
    return RankSteps(
        reports.timed_steps,
        reports.samples,
        reports.computed_sec / counts + reports.data_sec,
        reports.waited_sec / counts,
    )
