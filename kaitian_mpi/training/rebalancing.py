"""Following the ranks while they train: new plans, and which rank is slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kaitian_mpi.balance.optimum import RankCost
from kaitian_mpi.balance.rebalancer import NewPlan, RankStep, Rebalancer
from kaitian_mpi.balance.stragglers import COMMUNICATION, SlowPeriod, StragglerDetector
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import say
from kaitian_mpi.output.run_folder import RunFolder
from kaitian_mpi.training.link_probe import FEWEST, MOST, end_with_slow_links, time_links
from kaitian_mpi.training.step_exchange import StepReport


class Balancing:
    """Follows every rank's speed; all ranks draw the same conclusions from the same reports."""

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        batch_sizes: list[int],
        costs: list[RankCost] | None,
        adaptive: bool,
        steps_ahead: int = 0,
        min_batch: int = 1,
    ) -> None:
        """Begin with a plan.

        Args:
            world: the ranks.
            folder: where plans are written.
            batch_sizes: the plan.
            costs: of each rank, None where there was no benchmark.
            adaptive: whether to propose other plans; needs `costs`.
            steps_ahead: how many steps' batches are fetched before they are needed, which a new
                plan does not change any more.
            min_batch: the smallest batch that a plan may give.
        """
        self._world, self._folder, self._steps_ahead = world, folder, steps_ahead
        self._rebalancer = Rebalancer(costs, batch_sizes, min_batch) if adaptive and costs else None
        self._watch = StragglerDetector(world.size, costs or ())
        self.plans = 1

    def observe(self, step: int, reports: Sequence[StepReport]) -> list[int] | None:
        """Take in every rank's report of a step; return other batch sizes where they pay.

        Collective: where the exchange between hosts has become slow, its links are measured.

        Args:
            step: how many steps are done by now; the reports are of the one before.
            reports: by rank.
        """
        steps = [_rank_step(report) for report in reports]
        data_sec = [report.data_sec for report in reports]
        for change in self._watch.observe(step - 1, steps, data_sec):
            say(self._world, f"step {step}: {self._line(self._traced(change))}")
        plan = self._rebalancer.observe(steps) if self._rebalancer else None
        if plan is None:
            return None
        self._record(step, plan)
        return plan.batch_sizes

    def slow_ranks(self) -> list[dict[str, Any]]:
        """Return which ranks were slow, and why, for the summary."""
        return [
            {**dataclasses.asdict(slow), **self._where(slow.rank)} for slow in self._watch.found
        ]

    def costs(self) -> list[RankCost] | None:
        """Return what a step costs each rank by what has been seen of it; None if unknown."""
        return self._rebalancer.costs if self._rebalancer else None

    def _traced(self, change: SlowPeriod) -> SlowPeriod:
        """Find out by a few messages which host's links are slow, where the exchange has become so.

        Collective: all ranks see the same change at the same step.
        """
        first = {info.host: rank for rank, info in reversed(list(enumerate(self._world.infos)))}
        ends = sorted(first.values())
        begins = change.kind == COMMUNICATION and change.until_step is None
        if not begins or not FEWEST <= len(ends) <= MOST:
            return change
        found = end_with_slow_links(time_links(self._world.comm, ends))
        if found is None:
            return change
        end, factor = found
        text = f"{change.text}; messages to and from its host take {factor:.1f}x as long as usual"
        return self._watch.name(change, ends[end], text)

    def _record(self, step: int, plan: NewPlan) -> None:
        self.plans += 1
        line = {
            "step": step + self._steps_ahead,
            "decided_at_step": step,
            "batch_sizes": plan.batch_sizes,
            "why": f"{self._world.infos[plan.rank]} {plan.why}",
            "predicted_gain": round(plan.gain, 4),
            "times_as_long_as_measured": [round(factor, 3) for factor in plan.factors],
        }
        self._folder.append("plan.jsonl", line)
        say(
            self._world,
            f"step {step}: new plan {plan.batch_sizes}: {line['why']}",
        )

    def _line(self, slow: SlowPeriod) -> str:
        name = self._world.infos[slow.rank]
        if slow.until_step is not None:
            return f"{name} recovered ({slow.kind}, slow since step {slow.since_step})"
        return f"{name} is slow since step {slow.since_step} ({slow.kind}): {slow.text}"

    def _where(self, rank: int) -> dict[str, Any]:
        info = self._world.infos[rank]
        return {
            "rank": info.world_rank,
            "host": info.host,
            "device": info.device,
            "device_kind": info.kind,
        }


def _rank_step(report: StepReport) -> RankStep:
    """Return a rank's step; getting the batch is its own work, as computing is."""
    count = max(1, report.timed_steps)
    return RankStep(
        report.timed_steps,
        report.samples,
        report.computed_sec / count + report.data_sec,
        report.waited_sec / count,
    )
