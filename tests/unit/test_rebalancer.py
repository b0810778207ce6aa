"""Changes of plan during training and stragglers, in simulated jobs."""

import hashlib
import itertools
import math
import random

import numpy as np
import pytest
from choices import by_default
from rank_steps import rank_steps
from rebalancer_cases import run

from kaitian_mpi.balance import portable_math
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.fastest_split import plan_fastest
from kaitian_mpi.balance.rebalancer import Rebalancer, SpeedMonitors
from kaitian_mpi.balance.stragglers import COMMUNICATION, COMPUTE, DATA, StragglerDetector

SEEN = np.array([True])


def test_a_monitor_follows_the_median_of_its_rank():
    monitors = SpeedMonitors(1)
    assert np.isinf(monitors.log_errors)
    for ratio in (1.0, 1.02, 5.0, 0.98, 1.01, 0.99):  # one slow step is no change
        monitors.observe(np.array([ratio]), SEEN)
    assert np.exp(monitors.log_factors) == pytest.approx(1.0, abs=0.02)
    for _ in range(3):
        monitors.observe(np.array([3.0]), SEEN)
    assert np.exp(monitors.log_factors) == pytest.approx(3.0, rel=0.01)
    assert monitors.steps == 3  # it has begun again at the change


def test_many_monitors_are_as_one_for_each_rank():
    generator = random.Random(0)
    together = SpeedMonitors(5)
    alone = [SpeedMonitors(1) for _ in range(5)]
    for step in range(80):
        ratios = np.array([generator.uniform(0.9, 1.1) for _ in range(5)])
        ratios[3] *= 3.0 if step >= 40 else 1.0
        seen = np.array([generator.random() < 0.8 for _ in range(5)])
        together.observe(ratios, seen)
        for rank, monitor in enumerate(alone):
            if seen[rank]:
                monitor.observe(ratios[rank : rank + 1], SEEN)
        for name in ("steps", "log_factors", "log_errors"):
            expected = [getattr(monitor, name)[0] for monitor in alone]
            assert list(getattr(together, name)) == expected
    assert math.exp(together.log_factors[3]) == pytest.approx(3.0, rel=0.1)


class Job:
    """Simulated ranks: step time is the true cost times a slowdown factor times noise."""

    def __init__(self, speeds, noise, seed, measured_off=0.05):
        self.random = random.Random(seed)
        self.batch = 64 * len(speeds)
        self.noise = noise
        self.true = [RankCost(0.02, 0.01 * speed) for speed in speeds]
        errors = [self.random.uniform(1 - measured_off, 1 + measured_off) for _ in speeds]
        costs = [cost.times(error) for cost, error in zip(self.true, errors, strict=True)]
        self.shares = plan_fastest(costs, self.batch)
        self.rebalancer = Rebalancer(costs, self.shares)
        self.plans = []
        self.efficiency = []

    def run(self, steps, factors):
        """A rank is factors(step)[rank] times slower; a step's times are reported a step later."""
        rows = None
        best_sec = {}
        for step in range(steps):
            slow = tuple(factors(step))
            costs = [cost.times(factor) for cost, factor in zip(self.true, slow, strict=True)]
            if slow not in best_sec:
                best_sec[slow] = seconds(costs, plan_fastest(costs, self.batch))
            self.efficiency.append(best_sec[slow] / seconds(costs, self.shares))
            plan = self.rebalancer.observe(rank_steps(*rows)) if rows else None
            rows = noisy_rows(self.random, costs, self.shares, [self.noise] * len(costs), 0.005)
            if plan is not None:
                assert sum(plan.batch_sizes) == self.batch
                assert min(plan.batch_sizes) >= 1
                self.plans.append((step, plan))
                self.shares = plan.batch_sizes


def seconds(costs, shares):
    return max(cost.seconds(samples) for cost, samples in zip(costs, shares, strict=True))


def noisy_rows(chance, costs, shares, noises, communication_sec):
    """Return a step's rows for `rank_steps`."""
    work_sec = [
        cost.seconds(samples) * chance.uniform(1 - noise, 1 + noise)
        for cost, samples, noise in zip(costs, shares, noises, strict=True)
    ]
    longest_sec = max(work_sec)
    return [
        (1, samples, sec, longest_sec - sec + communication_sec)
        for samples, sec in zip(shares, work_sec, strict=True)
    ]


@pytest.mark.parametrize(
    "speeds", by_default([[1, 3], [1, 1, 3, 3], [1] * 4 + [2, 2, 3, 3]], [[1, 3]])
)
def test_ten_percent_noise_does_not_cause_oscillation(speeds):
    for seed in range(3):
        job = Job(speeds, noise=0.1, seed=seed)
        job.run(500, lambda _: [1.0] * len(speeds))
        assert len(job.plans) <= 4
        for (_, plan), (_, next_plan) in itertools.pairwise(job.plans):
            assert plan.batch_sizes != next_plan.batch_sizes
        assert sum(job.efficiency[20:]) / 480 > 0.94


@pytest.mark.parametrize("seed", by_default(range(8), (0, 2)))
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


@pytest.mark.parametrize(
    ("rows", "min_batch", "batch_sizes", "factors", "gain"),
    [
        # A wrong benchmark is corrected.
        ([(1, 32, 0.32, 0.64), (1, 32, 0.96, 0.0)], 1, [[48, 16]], [1.0, 3.0], 1.0),
        # New plans respect the minimum batch.
        ([(1, 32, 0.32, 32.0), (1, 32, 32.0, 0.0)], 2, [[62, 2]], [1.0, 100.0], 15),
        # Communication dominates.
        ([(1, 32, 0.32, 10.0), (1, 32, 0.48, 9.84)], 1, [], [1.0, 1.5], None),
        # Steps with shares other than the plan's are ignored.
        ([(1, 8, 0.08, 0), (1, 8, 0.8, 0)], 1, [], [1.0, 1.0], None),
        # A device without a completed step is ignored.
        ([(0, 32, 0.0, 0.0), (1, 32, 0.32, 0)], 1, [], [1.0, 1.0], None),
    ],
)
def test_plans_from_constant_times(rows, min_batch, batch_sizes, factors, gain):
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [32, 32], min_batch)
    observed = [rebalancer.observe(rank_steps(*rows)) for _ in range(40)]
    plans = [plan for plan in observed if plan is not None]
    assert [plan.batch_sizes for plan in plans] == batch_sizes
    assert rebalancer.factors == pytest.approx(factors)
    for plan in plans:
        assert plan.factors == pytest.approx(factors)
        assert plan.gain == pytest.approx(gain)


def test_a_plan_at_most_doubles_a_batch_that_is_computed_at_once():
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [8, 56])
    largest = 8
    sizes = []
    for _ in range(60):
        pairs = zip(rebalancer.batch_sizes, (0.001, 0.01), strict=True)
        rows = [(1, samples, samples * sample_sec, 0.0) for samples, sample_sec in pairs]
        plan = rebalancer.observe(rank_steps(*rows), 2)
        if plan is not None:
            assert sum(plan.batch_sizes) == 64
            assert plan.batch_sizes[0] <= 2 * largest
            largest = max(largest, plan.batch_sizes[0])
            sizes.append(plan.batch_sizes)
    assert sizes == [[16, 48], [32, 32], [59, 5]]


@pytest.mark.parametrize("ranks", [2, 8, 48])
def test_a_wrong_alpha_does_not_move_samples_back_and_forth(ranks):
    chance = random.Random(ranks)
    # As measured on cores that are shared by many ranks: the samples hardly matter.
    measured = [RankCost(chance.uniform(0.05, 0.15), 0.0045) for _ in range(ranks)]
    cost = RankCost(0.003, 0.0125)
    plans = 0
    rebalancer = Rebalancer(measured, plan_fastest(measured, 8 * ranks))
    for _ in range(100):
        rows = noisy_rows(chance, [cost] * ranks, rebalancer.batch_sizes, [0.03] * ranks, 0.001)
        plans += rebalancer.observe(rank_steps(*rows)) is not None
    assert plans <= 5
    assert cost.seconds(max(rebalancer.batch_sizes)) < 1.15 * cost.seconds(8)


@pytest.mark.parametrize("seed", [3, 11, 12])
def test_no_new_plan_where_all_ranks_become_faster_and_one_of_them_is_noisy(seed):
    """The more certain estimates alone would make a difference that is none."""
    chance = random.Random(seed)
    costs = [RankCost(0.02, 0.001 * times) for times in (1, 1, 2.5)]
    shares = plan_fastest(costs, 128)
    rebalancer = Rebalancer(costs, shares)
    faster = [cost.times(0.82) for cost in costs]
    for _ in range(14):
        rows = noisy_rows(chance, faster, shares, (0.01, 0.01, 0.15), 0.001)
        assert rebalancer.observe(rank_steps(*rows)) is None


@pytest.mark.parametrize("seed", by_default([1, 27, 35, 41, 54], [27, 35]))
def test_rounding_makes_no_cost_negative(seed):
    """As it did in most of these jobs: a negative alpha is no cost, and ended them."""
    chance = random.Random(seed)
    rebalancer, slowdowns = Rebalancer([RankCost(0.0, 0.01)] * 2, [32, 32]), [1.0, 1.0]
    for _ in range(300):
        if chance.random() < 0.1:
            slowdowns[chance.randrange(2)] = chance.choice([0.3, 0.5, 1, 2, 3, 5])
        work = [
            0.01 * samples * slowdown * chance.lognormvariate(0, 0.2)
            for samples, slowdown in zip(rebalancer.batch_sizes, slowdowns, strict=True)
        ]
        pairs = zip(rebalancer.batch_sizes, work, strict=True)
        rebalancer.observe(rank_steps(*((1, b, sec, max(work) - sec + 1e-3) for b, sec in pairs)))
        assert all(cost.alpha_sec >= 0 and cost.beta_sec > 0 for cost in rebalancer.costs)


@pytest.mark.parametrize(("max_growth", "expected"), [(math.inf, [48, 16]), (2, None)])
def test_the_memory_limits_a_share_unless_it_is_computed_in_micro_batches(max_growth, expected):
    costs = [RankCost(0.0, 0.01, largest_micro_batch=8)] * 2
    rebalancer, rows = Rebalancer(costs, [32, 32]), [(1, 32, 0.32, 0.64), (1, 32, 0.96, 0.0)]
    plans = [plan for _ in range(5) if (plan := rebalancer.observe(rank_steps(*rows), max_growth))]
    assert [plan.batch_sizes for plan in plans] == ([expected] if expected else [])


@pytest.mark.parametrize("seed", by_default(range(24), (1, 2, 4)))
def test_a_random_job_is_followed_to_its_end(seed):
    run(seed)


def watch(steps, report, ranks=3, costs=()):
    """Observe steps 1, 2, … as `report` returns them; return changes as (rank, kind, begins)."""
    detector = StragglerDetector(ranks, costs)
    changes = []
    for step in range(1, steps + 1):
        rows, data_sec = report(step)
        for change in detector.observe(step, rank_steps(*rows), np.array(data_sec)):
            changes.append((change.rank, change.kind, change.until_step is None))
    return detector, changes


def even(work=0.3, wait=0.01):
    return [(1, 32, work, wait) for _ in range(3)]


def test_equally_fast_ranks_are_not_reported():
    detector, changes = watch(50, lambda _: (even(), [0.0] * 3))
    assert changes == []
    assert detector.periods == []


def test_a_rank_that_slows_down_or_recovers_is_reported():
    def report(step):
        factor = 3.0 if 30 <= step < 60 else 1.0
        rows = even()
        rows[1] = (1, 32, 0.3 * factor, 0.01)
        for rank in (0, 2):
            rows[rank] = (1, 32, 0.3, 0.01 + 0.3 * (factor - 1))
        return rows, [0.0] * 3

    detector, changes = watch(100, report)
    assert changes == [(1, COMPUTE, True), (1, COMPUTE, False)]
    (slow,) = detector.periods
    assert abs(slow.since_step - 30) <= 2
    assert 60 <= slow.until_step <= 70
    assert 2.7 < slow.amount < 3.3
    assert "as long" in slow.text


def test_smaller_shares_are_not_reported_as_slow():
    cost = RankCost(0.2, 0.01)

    def report(step):
        samples = 64 if step < 30 else 16
        return [(1, samples, cost.seconds(samples), 0.01)] * 2, [0.0] * 2

    detector, _ = watch(80, report, ranks=2, costs=[cost, cost])
    assert detector.periods == []


ROWS, WAITS = even(), (1, 32, 0.3, 0.4)


@pytest.mark.parametrize(
    ("rows", "data_sec", "expected"),
    [
        ([(1, 32, 0.3, 0.3), (1, 32, 0.3, 0.3), (1, 32, 0.6, 0)], 0.0, [(2, COMPUTE, 2.0)]),
        # Getting its batch takes 0.15 s of the 0.45 s.
        ([*ROWS[:2], (1, 32, 0.45, 0.01)], 0.15, [(2, COMPUTE, 1.5), (2, DATA, 0.33)]),
        # Communication is the wait of the last rank to arrive.
        ([WAITS, (1, 32, 0.35, 0.35), WAITS], 0.0, [(1, COMMUNICATION, 0.5)]),
    ],
)
def test_a_slow_rank_and_why(rows, data_sec, expected):
    detector, _ = watch(20, lambda _: (rows, [0.0, 0.0, data_sec]))
    periods = [
        (period.rank, period.kind, pytest.approx(period.amount, abs=0.01))
        for period in detector.periods
    ]
    assert periods == expected
    if expected[0][1] == COMPUTE:
        assert "wait for it" in detector.periods[0].text


def test_exponentials_and_logarithms_have_the_same_bits_on_every_machine():
    """So all ranks plan alike. The bits are those of exact operations, found once."""
    values = np.array([1e-12, 0.3, 0.7071067811865475, 1.0, 1.1, 2.0, 3.5, 1e9])
    logs, powers = portable_math.log(values), portable_math.exp(np.linspace(-30, 30, 7))
    np.testing.assert_allclose(logs, [*map(math.log, values)], rtol=0, atol=1e-10)
    np.testing.assert_allclose(powers, [*map(math.exp, range(-30, 31, 10))], rtol=1e-10)
    bits = np.concatenate([logs, powers]).tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == "c9311b55a9075733"
    assert (portable_math.log(np.ones(3)) == 0).all()
    assert (portable_math.exp(np.zeros(3)) == 1).all()
