"""Adjusts the plan to the ranks' speeds while they train, and reports slow ranks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kaitian_mpi.balance.cost_learner import MAX_GROWTH, CostLearner
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.balance.rank_steps import RankSteps
from kaitian_mpi.balance.rebalancer import Rebalancer
from kaitian_mpi.balance.stragglers import COMMUNICATION, SlowPeriod, StragglerDetector
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.step import Step, StepObserver, StepReports

if TYPE_CHECKING:
    from mpi4py import MPI

# With two hosts either may be the slow one; links are measured one after the other.
MIN_HOSTS, MAX_HOSTS = 3, 256
_LINK_BYTES = 256 << 10
_LINK_REPEATS = 8
_SLOW_FACTOR = 2.0


def _ignore(batch_sizes: list[int]) -> None:
    pass


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
        set_plan: Callable[[list[int]], None] = _ignore,
        own_steps_ahead: int = 0,
        steps_ahead: int = 0,
        min_batch: int = 1,
        has_micro_batches: bool = True,
        sinks: Sinks | None = None,
    ) -> None:
        """Start with a plan.

        Args:
            world: the ranks.
            folder: for the lines about plans.
            batch_sizes: the plan.
            costs: the ranks' costs; None without a benchmark.
            adaptive: whether to propose new plans; without `costs`, they are learned first.
            set_plan: applies new batch sizes to the steps that this rank has not fetched yet.
            own_steps_ahead: for how many steps this rank fetches batches in advance.
            steps_ahead: the largest of these numbers. All ranks apply a plan at the same step.
            min_batch: the smallest batch size in a plan.
            has_micro_batches: whether a batch that does not fit the memory is split; otherwise
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


def time_links(comm: MPI.Comm, ends: Sequence[int]) -> list[float]:
    """Time the link from each of some ranks to the next, in a ring. Collective.

    Returns:
        Seconds to exchange 256 KiB in both directions at once, the shortest of eight times, by
        link; the last link is from the last rank to the first.
    """
    own, other = np.zeros(_LINK_BYTES, dtype=np.uint8), np.empty(_LINK_BYTES, dtype=np.uint8)
    own_times: dict[int, float] = {}
    for link, left in enumerate(ends):
        right = ends[(link + 1) % len(ends)]
        if comm.rank not in (left, right):
            continue
        partner = right if comm.rank == left else left
        times = []
        for _ in range(_LINK_REPEATS):
            start = time.perf_counter()
            comm.Sendrecv(own, partner, recvbuf=other, source=partner)
            times.append(time.perf_counter() - start)
        if comm.rank == left:
            own_times[link] = min(times)
    times_by_link = {
        int(link): sec
        for by_rank in gather_values(comm, own_times)
        for link, sec in by_rank.items()
    }
    return [times_by_link[link] for link in range(len(ends))]


def end_with_slow_links(links: Sequence[float]) -> tuple[int, float] | None:
    """Return the index of the rank with two slow links, and how many times slower they are.

    Returns:
        None if no rank's faster link takes at least twice as long as the median rank's.
    """
    faster = [min(link, links[end - 1]) for end, link in enumerate(links)]
    worst = max(faster)
    factor = worst / median(faster)
    return (faster.index(worst), factor) if factor >= _SLOW_FACTOR else None
