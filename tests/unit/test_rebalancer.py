"""Changes of plan during training and stragglers, in simulated jobs."""

import hashlib
import itertools
import math
import random

import numpy as np
import pytest
from rank_steps import rank_steps
from rebalancer_cases import run

from kaitian_mpi.balance import portable_math
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.rebalancer import Rebalancer, SpeedMonitors
from kaitian_mpi.balance.shares import plan_fastest
from kaitian_mpi.balance.stragglers import COMMUNICATION, COMPUTE, DATA, StragglerDetector

SEEN = np.array([True])


def test_each_of_many_monitors_follows_the_median_of_its_own_rank():
    monitors = SpeedMonitors(1)
    assert np.isinf(monitors.log_errors)
    for ratio in (1.0, 1.02, 5.0, 0.98, 1.01, 0.99):  # one slow step is no change
        monitors.observe(np.array([ratio]), SEEN)
    assert np.exp(monitors.log_factors) == pytest.approx(1.0, abs=0.02)
    for _ in range(3):
        monitors.observe(np.array([3.0]), SEEN)
    assert np.exp(monitors.log_factors) == pytest.approx(3.0, rel=0.01)
    assert monitors.steps == 3  # it has begun again at the change
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
        for name in ("steps", "log_factors", "log_errors"):
            assert [*getattr(together, name)] == [getattr(each, name)[0] for each in alone]
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

    def run(self, steps, factors):
        """A rank is factors(step)[rank] times slower; what a step tells is known a step later."""
        told, best_sec = None, {}
        for step in range(steps):
            slow = tuple(factors(step))
            now = [m.times(f) for m, f in zip(self.true, slow, strict=True)]
            if slow not in best_sec:
                best_sec[slow] = seconds(now, plan_fastest(now, self.batch))
            self.efficiency.append(best_sec[slow] / seconds(now, self.shares))
            plan = self.rebalancer.observe(rank_steps(*told)) if told else None
            told = noisy_rows(self.random, now, self.shares, [self.noise] * len(now), 0.005)
            if plan is not None:
                assert sum(plan.batch_sizes) == self.batch
                assert min(plan.batch_sizes) >= 1
                self.plans.append((step, plan))
                self.shares = plan.batch_sizes


def seconds(models, shares):
    return max(m.seconds(b) for m, b in zip(models, shares, strict=True))


def noisy_rows(chance, costs, shares, noises, communication):
    """Return a step's rows for `rank_steps`."""
    work = [
        cost.seconds(b) * chance.uniform(1 - noise, 1 + noise)
        for cost, b, noise in zip(costs, shares, noises, strict=True)
    ]
    return [(1, b, w, max(work) - w + communication) for b, w in zip(shares, work, strict=True)]


@pytest.mark.parametrize("speeds", [[1, 3], [1, 1, 3, 3], [1, 1, 1, 1, 2, 2, 3, 3]])
def test_ten_percent_noise_does_not_cause_oscillation(speeds):
    for seed in range(3):
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


def test_plans_from_constant_times_at_most_double_a_batch_computed_at_once():
    for rows, min_batch, batch_sizes, factors, gain in (
        # A wrong benchmark is corrected.
        ([(1, 32, 0.32, 0.64), (1, 32, 0.96, 0.0)], 1, [48, 16], [1.0, 3.0], 1.0),
        # New plans respect the minimum batch.
        ([(1, 32, 0.32, 32.0), (1, 32, 32.0, 0.0)], 2, [62, 2], [1.0, 100.0], 15),
        # Communication dominates.
        ([(1, 32, 0.32, 10.0), (1, 32, 0.48, 9.84)], 1, None, [1.0, 1.5], None),
        # Steps with shares other than the plan's are ignored.
        ([(1, 8, 0.08, 0), (1, 8, 0.8, 0)], 1, None, [1.0, 1.0], None),
        # A device without a completed step is ignored.
        ([(0, 32, 0.0, 0.0), (1, 32, 0.32, 0)], 1, None, [1.0, 1.0], None),
    ):
        rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [32, 32], min_batch)
        found = [rebalancer.observe(rank_steps(*rows)) for _ in range(40)]
        plans = [plan for plan in found if plan is not None]
        assert [plan.batch_sizes for plan in plans] == [batch_sizes] * (batch_sizes is not None)
        assert rebalancer.factors == pytest.approx(factors)
        for plan in plans:
            assert plan.factors == pytest.approx(factors)
            assert plan.gain == pytest.approx(gain)
    rebalancer = Rebalancer([RankCost(0.0, 0.01)] * 2, [8, 56])
    largest, sizes = 8, []
    for _ in range(60):
        pairs = zip(rebalancer.batch_sizes, (0.001, 0.01), strict=True)
        plan = rebalancer.observe(rank_steps(*((1, b, b * speed, 0.0) for b, speed in pairs)), 2)
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
    cost, plans = RankCost(0.003, 0.0125), 0
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


@pytest.mark.parametrize("seed", [1, 27, 35, 41, 54])
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


FURTHER_SEEDS = (pytest.param(seed, marks=pytest.mark.thorough) for seed in range(6, 24))


@pytest.mark.parametrize("seed", [*range(6), *FURTHER_SEEDS])
def test_a_random_job_is_followed_to_its_end(seed):
    run(seed)


def watch(steps, told, ranks=3, costs=()):
    """Feed steps 1, 2, … and return the events as (step, rank, kind, begins)."""
    watch = StragglerDetector(ranks, costs)
    seen = []
    for step in range(1, steps + 1):
        rows, data = told(step)
        for change in watch.observe(step, rank_steps(*rows), np.array(data)):
            seen.append((step, change.rank, change.kind, change.until_step is None))
    return watch, seen


def even(work=0.3, wait=0.01):
    return [(1, 32, work, wait) for _ in range(3)]


def test_a_rank_that_slows_down_or_recovers_is_reported_and_not_a_smaller_share():
    watched, seen = watch(50, lambda _: (even(), [0.0] * 3))
    assert (seen, watched.periods) == ([], [])

    def told(step):
        slow = 3.0 if 30 <= step < 60 else 1.0
        steps = even()
        steps[1] = (1, 32, 0.3 * slow, 0.01)
        for rank in (0, 2):
            steps[rank] = (1, 32, 0.3, 0.01 + 0.3 * (slow - 1))
        return steps, [0.0] * 3

    watched, seen = watch(100, told)
    assert [each[1:] for each in seen] == [(1, COMPUTE, True), (1, COMPUTE, False)]
    (slow,) = watched.periods
    assert abs(slow.since_step - 30) <= 2
    assert 60 <= slow.until_step <= 70
    assert 2.7 < slow.amount < 3.3
    assert "as long" in slow.text
    cost = RankCost(0.2, 0.01)

    def told(step):
        samples = 64 if step < 30 else 16
        return [(1, samples, cost.seconds(samples), 0.01)] * 2, [0.0] * 2

    watched, _ = watch(80, told, ranks=2, costs=[cost, cost])
    assert watched.periods == []


ROWS, WAITS = even(), (1, 32, 0.3, 0.4)


@pytest.mark.parametrize(
    ("rows", "data", "found"),
    [
        ([(1, 32, 0.3, 0.3), (1, 32, 0.3, 0.3), (1, 32, 0.6, 0)], 0.0, [(2, COMPUTE, 2.0)]),
        # 0.15 s of these for its batch.
        ([*ROWS[:2], (1, 32, 0.45, 0.01)], 0.15, [(2, COMPUTE, 1.5), (2, DATA, 0.33)]),
        # Communication is the wait of the last rank to arrive.
        ([WAITS, (1, 32, 0.35, 0.35), WAITS], 0.0, [(1, COMMUNICATION, 0.5)]),
    ],
)
def test_a_slow_rank_and_why(rows, data, found):
    watched, _ = watch(20, lambda _: (rows, [0.0, 0.0, data]))
    slow = [
        (each.rank, each.kind, pytest.approx(each.amount, abs=0.01)) for each in watched.periods
    ]
    assert slow == found
    if found[0][1] == COMPUTE:
        assert "wait for it" in watched.periods[0].text


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
