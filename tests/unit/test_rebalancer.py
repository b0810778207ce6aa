"""Changes of plan during training, in simulated jobs."""

import itertools
import math
import random

import numpy as np
import pytest
from rank_steps import rank_steps

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.monitor import SpeedMonitors
from kaitian_mpi.balance.rebalancer import Rebalancer
from kaitian_mpi.balance.shares import plan_fastest

SEEN = np.array([True])


def test_a_monitor_uses_the_median_and_restarts_at_a_change():
    monitors = SpeedMonitors(1)
    assert np.isinf(monitors.log_errors)
    for ratio in (1.0, 1.02, 5.0, 0.98, 1.01, 0.99):  # one slow step is no change
        monitors.observe(np.array([ratio]), SEEN)
    assert np.exp(monitors.log_factors) == pytest.approx(1.0, abs=0.02)
    for _ in range(3):
        monitors.observe(np.array([3.0]), SEEN)
    assert np.exp(monitors.log_factors) == pytest.approx(3.0, rel=0.01)
    assert monitors.steps == 3


def test_each_of_many_monitors_follows_its_own_rank():
    generator = random.Random(0)
    together, alone = SpeedMonitors(5), [SpeedMonitors(1) for _ in range(5)]
    for step in range(80):
        ratios = np.array([generator.uniform(0.9, 1.1) for _ in range(5)])
        ratios[3] *= 3.0 if step >= 40 else 1.0
        seen = np.array([generator.random() < 0.8 for _ in range(5)])
        together.observe(ratios, seen)
        for rank, monitor in enumerate(alone):
            if seen[rank]:
                monitor.observe(ratios[rank : rank + 1], SEEN)
        assert together.steps.tolist() == [monitor.steps[0] for monitor in alone]
        assert together.log_factors.tolist() == [monitor.log_factors[0] for monitor in alone]
        assert together.log_errors.tolist() == [monitor.log_errors[0] for monitor in alone]
    assert math.exp(together.log_factors[3]) == pytest.approx(3.0, rel=0.1)


class Job:
    """Simulated ranks: step time is the true cost times a slowdown factor times noise."""

    def __init__(self, speeds, noise, seed, measured_off=0.05):
        self.random = random.Random(seed)
        self.batch = 64 * len(speeds)
        self.noise = noise
        self.true = [RankCost(0.02, 0.01 * speed) for speed in speeds]
        off = [self.random.uniform(1 - measured_off, 1 + measured_off) for _ in speeds]
        costs = [m.times(f) for m, f in zip(self.true, off, strict=True)]
        self.shares = plan_fastest(costs, self.batch)
        self.rebalancer = Rebalancer(costs, self.shares)
        self.plans = []
        self.efficiency = []
        self.best_sec = {}

    def run(self, steps, factors):
        """A rank is factors(step)[rank] times slower; what a step tells is known a step later."""
        told = None
        for step in range(steps):
            now = [m.times(f) for m, f in zip(self.true, factors(step), strict=True)]
            best_sec = self._best_sec(tuple(factors(step)), now)
            self.efficiency.append(best_sec / self._seconds(now, self.shares))
            work = [
                m.seconds(b) * self.random.uniform(1 - self.noise, 1 + self.noise)
                for m, b in zip(now, self.shares, strict=True)
            ]
            steps_now = [
                (1, b, w, max(work) - w + 0.005) for b, w in zip(self.shares, work, strict=True)
            ]
            plan = self.rebalancer.observe(rank_steps(*told)) if told else None
            told = steps_now
            if plan is not None:
                assert sum(plan.batch_sizes) == self.batch
                assert min(plan.batch_sizes) >= 1
                self.plans.append((step, plan))
                self.shares = plan.batch_sizes

    def _best_sec(self, factors, now):
        if factors not in self.best_sec:
            best = plan_fastest(now, self.batch)
            self.best_sec[factors] = self._seconds(now, best)
        return self.best_sec[factors]

    @staticmethod
    def _seconds(models, shares):
        return max(m.seconds(b) for m, b in zip(models, shares, strict=True))


@pytest.mark.parametrize("speeds", [[1, 3], [1, 1, 3, 3], [1, 1, 1, 1, 2, 2, 3, 3]])
def test_ten_percent_noise_does_not_cause_oscillation(speeds):
    for seed in range(8):
        job = Job(speeds, noise=0.1, seed=seed)
        job.run(500, lambda _: [1.0] * len(speeds))
        assert len(job.plans) <= 4
        for (_, one), (_, other) in itertools.pairwise(job.plans):
            assert one.batch_sizes != other.batch_sizes
        assert sum(job.efficiency[20:]) / 480 > 0.94


@pytest.mark.parametrize("seed", range(8))
def test_slowdown_and_recovery_of_a_rank_need_few_plans_and_steps(seed):
    job = Job([1, 1], noise=0.04, seed=seed, measured_off=0.02)
    job.run(200, lambda step: [1.0, 3.0 if 50 <= step < 120 else 1.0])
    changes = [plan for step, plan in job.plans if step >= 50]
    assert 2 <= len(changes) <= 4
    assert min(job.efficiency[65:120]) >= 0.95
    assert min(job.efficiency[135:]) >= 0.95
    first = next(plan for step, plan in job.plans if step >= 50)
    assert first.rank == 1
    assert first.gain > 0.3
    assert "x as long as planned" in first.reason


def test_a_wrong_benchmark_is_corrected():
    costs = [RankCost(0.0, 0.01), RankCost(0.0, 0.01)]
    rebalancer = Rebalancer(costs, [32, 32])
    plan = None
    for _ in range(20):
        steps = [(1, 32, 0.32, 0.64), (1, 32, 0.96, 0.0)]
        plan = plan or rebalancer.observe(rank_steps(*steps))
    assert plan is not None
    assert plan.batch_sizes == [48, 16]
    assert plan.factors == [pytest.approx(1.0), pytest.approx(3.0)]
    assert plan.gain == pytest.approx(1.0)


def test_new_plans_respect_the_minimum_batch():
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [32, 32], min_batch=2)
    found = [
        rebalancer.observe(rank_steps((1, 32, 0.32, 32.0), (1, 32, 32.0, 0.0))) for _ in range(20)
    ]
    (plan,) = [plan for plan in found if plan is not None]
    assert plan.batch_sizes == [62, 2]


def test_a_batch_that_is_computed_at_once_at_most_doubles_from_plan_to_plan():
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [8, 56], max_growth=2)
    speeds = [0.001, 0.01]
    largest, sizes = 8, []
    for _ in range(60):
        shares = rebalancer.batch_sizes
        times = [share * speed for share, speed in zip(shares, speeds, strict=True)]
        plan = rebalancer.observe(
            rank_steps(*((1, b, sec, 0.0) for b, sec in zip(shares, times, strict=True)))
        )
        if plan is not None:
            assert sum(plan.batch_sizes) == 64
            assert plan.batch_sizes[0] <= 2 * largest
            largest = max(largest, plan.batch_sizes[0])
            sizes.append(plan.batch_sizes)
    assert sizes == [[16, 48], [32, 32], [59, 5]]


@pytest.mark.parametrize("seed", [3, 11, 12])
def test_no_new_plan_where_all_ranks_become_faster_and_one_of_them_is_noisy(seed):
    """The more certain estimates alone would make a difference that is none."""
    chance = random.Random(seed)
    costs = [RankCost(0.02, 0.001 * times) for times in (1, 1, 2.5)]
    shares = plan_fastest(costs, 128)
    rebalancer = Rebalancer(costs, shares)
    for _ in range(14):
        work = [
            cost.seconds(b) * 0.82 * (1 + chance.uniform(-noise, noise))
            for cost, b, noise in zip(costs, shares, (0.01, 0.01, 0.15), strict=True)
        ]
        steps = [(1, b, w, max(work) - w + 0.001) for b, w in zip(shares, work, strict=True)]
        assert rebalancer.observe(rank_steps(*steps)) is None


def test_no_new_plan_where_communication_dominates():
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [32, 32])
    for _ in range(40):
        steps = [(1, 32, 0.32, 10.0), (1, 32, 0.48, 9.84)]
        assert rebalancer.observe(rank_steps(*steps)) is None


def test_steps_with_shares_other_than_the_plans_are_ignored():
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [32, 32])
    for _ in range(40):
        assert rebalancer.observe(rank_steps((1, 8, 0.08, 0), (1, 8, 0.8, 0))) is None
    assert rebalancer.factors == [1.0, 1.0]


def test_a_device_without_a_completed_step_is_ignored():
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [32, 32])
    for _ in range(40):
        assert rebalancer.observe(rank_steps((0, 32, 0.0, 0.0), (1, 32, 0.32, 0))) is None
    assert rebalancer.factors == [1.0, pytest.approx(1.0)]
