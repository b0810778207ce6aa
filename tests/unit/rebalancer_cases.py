"""Simulated jobs of random ranks: their plans follow the ranks' speed, and nothing is raised.

A job follows from its seed alone: how many ranks, what a step costs each, noise, sudden changes of
speed, devices that report late, batches that are not full, memory limits; batches that are tiny or
large; costs from a benchmark, or learned from the first steps.

    python tests/unit/rebalancer_cases.py 0:1000        # the jobs of seeds 0 to 999
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import traceback
from types import SimpleNamespace

import numpy as np

from kaitian_mpi.balance.cost_learner import CostLearner
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.fastest_split import plan_fastest
from kaitian_mpi.balance.rebalancer import MAX_GROWTH, RankSteps, Rebalancer
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.balance.stragglers import StragglerDetector
from kaitian_mpi.integrations.adaptive_plan import AdaptivePlan

STEPS = 300


class Job:
    """Ranks whose speed changes, and what they report of each step."""

    def __init__(self, seed: int) -> None:
        self.random = chance = random.Random(seed)
        pick = chance.choice
        self.ranks = pick([2, 2, 3, 4, chance.randint(2, 16), chance.randint(2, 64)])
        self.min_batch = pick([1, 1, 2])
        per_rank = pick([1, 1, 2, 3, 8, 32, 300])
        self.batch = self.ranks * self.min_batch * per_rank + chance.randint(0, self.ranks)
        self.noise = pick([0.0, 0.01, 0.05, 0.2, 0.6, 1.5])
        self.changes = pick([0.0, 0.01, 0.1])
        self.slow_steps = pick([0.0, 0.02])
        self.late, self.partial = pick([0.0, 0.0, 0.2]), pick([0.0, 0.1])
        self.communication = pick([0.0, 1e-3, 0.1])
        self.splits_shares = pick([True, False])
        unit, part = 10 ** chance.uniform(-6, 0), pick([0.0, 0.1, 1.0, 10.0])
        limited = pick([0.0, 0.0, 0.5, 1.0])
        self.costs = [
            RankCost(
                unit * part * chance.random() * per_rank,
                unit * chance.lognormvariate(0, 0.7),
                chance.randint(1, 2 * per_rank) if chance.random() < limited else None,
            )
            for _ in range(self.ranks)
        ]
        self.slowness = [1.0] * self.ranks
        self.is_measured = pick([True, False])
        self.ahead = pick([0, 0, 3])

    def measured(self) -> list[RankCost]:
        """Return the costs by a benchmark, which may be far off."""
        off = self.random.choice([0.0, 0.05, 1.0])
        return [cost.times(self.random.lognormvariate(0, off)) for cost in self.costs]

    def change_speeds(self) -> None:
        if self.random.random() < self.changes:
            rank = self.random.randrange(self.ranks)
            self.slowness[rank] = self.random.choice([0.01, 0.3, 0.5, 1, 2, 3, 5, 100])

    def report(self, shares: list[int]) -> RankSteps:
        """Return what the ranks report of a step with these shares."""
        chance, work, steps = self.random, [], []
        if chance.random() < self.partial:  # the last one of an epoch
            shares = apportion(chance.randint(1, self.batch), shares)
        for cost, samples, slowness in zip(self.costs, shares, self.slowness, strict=True):
            is_slow = chance.random() < self.slow_steps
            noise = chance.lognormvariate(0, self.noise) * (10 if is_slow else 1)
            is_late = chance.random() < self.late
            steps.append(chance.choice([0, 2]) if is_late else 1)
            work.append(cost.seconds(samples) * slowness * noise if steps[-1] else 0.0)
        waits = [max(work) - sec + self.communication for sec in work]
        return RankSteps(np.array(steps), np.array(shares), np.array(work), np.array(waits))


def run(seed: int) -> int:
    """Simulate the job of a seed; return how many plans it had. Raises whatever goes wrong."""
    job = Job(seed)
    return follow_measured(job) if job.is_measured else follow_learned(job)


def follow_measured(job: Job) -> int:
    """Rebalance a job from a benchmark on, as `Training` does."""
    costs = job.measured()
    shares = plan_fastest(costs, job.batch, job.min_batch)
    return rebalance(job, Rebalancer(costs, shares, job.min_batch), STEPS)


def rebalance(job: Job, rebalancer: Rebalancer, steps: int) -> int:
    max_growth = math.inf if job.splits_shares else MAX_GROWTH
    stragglers = StragglerDetector(job.ranks, rebalancer.costs)
    largest, plans = list(rebalancer.batch_sizes), 0
    for step in range(steps):
        job.change_speeds()
        report = job.report(rebalancer.batch_sizes)
        stragglers.observe(step, report, report.work_sec * job.random.random())
        plan = rebalancer.observe(report, max_growth)
        check_costs(rebalancer.costs)
        if plan is not None:
            plans += 1
            check_shares(plan.batch_sizes, job)
            assert plan.gain > 0
            assert all(map(math.isfinite, [plan.gain, *plan.factors]))
            for share, before in zip(plan.batch_sizes, largest, strict=True):
                assert share <= max_growth * before
            largest = list(map(max, largest, plan.batch_sizes))
    return plans


def follow_learned(job: Job) -> int:
    """Learn a job's costs, and rebalance it then, as `Training` or adaptive batches do."""
    if job.random.random() < 0.5:
        return follow_adaptive(job)
    equal = apportion(job.batch, [1] * job.ranks)
    learner, plans = CostLearner(equal, job.min_batch, job.ahead), 0
    waiting: list[list[int]] = [equal] * (job.ahead + 1)
    for step in range(STEPS):
        job.change_speeds()
        plans += learner.observe(job.report(waiting.pop(0))) is not None
        waiting.append(learner.batch_sizes)
        check_shares(learner.batch_sizes, job)
        if learner.costs is not None:
            check_costs(learner.costs)
            rebalancer = Rebalancer(learner.costs, learner.batch_sizes, job.min_batch)
            return plans + rebalance(job, rebalancer, STEPS - step)
    return plans


def follow_adaptive(job: Job) -> int:
    rows = job.batch // job.ranks
    job.batch = rows * job.ranks
    plan, plans = AdaptivePlan(rows, [SimpleNamespace()] * job.ranks, job.min_batch), 0
    for _ in range(STEPS):
        job.change_speeds()
        plans += bool(plan.observe(job.report(plan.shares)))
        check_shares(plan.shares, job)
        some = job.random.randint(1, job.batch)
        divided = plan.divide(some)
        assert sum(divided) == some
        assert min(divided) >= (some >= job.ranks)
    return plans


def check_shares(shares: list[int], job: Job) -> None:
    assert sum(shares) == job.batch
    assert min(shares) >= job.min_batch


def check_costs(costs: list[RankCost]) -> None:
    assert all(0 <= cost.alpha_sec < math.inf and 0 < cost.beta_sec < math.inf for cost in costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seeds", help="one, or the first and the end: 0:1000")
    begin, _, end = parser.parse_args().seeds.partition(":")
    seeds, plans, failed = range(int(begin), int(end or int(begin) + 1)), 0, []
    for seed in seeds:
        try:
            plans += run(seed)
        except Exception:
            failed.append(seed)
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
    print(f"{len(seeds)} jobs, {plans} plans; {len(failed)} raised: {failed}")
    sys.exit(min(len(failed), 1))


if __name__ == "__main__":
    main()
