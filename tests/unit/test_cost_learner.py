"""Learning what a step costs from the first training steps, in simulated jobs."""

import json
import random
from collections import deque
from statistics import mean, median
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from choices import by_default
from rank_steps import rank_steps

from kaitian_mpi.balance.cost_learner import CostLearner
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.fastest_split import plan_fastest
from kaitian_mpi.balance.shares import plan_equal
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe.run_folder import DiskFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train import rebalancing
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.step_times import StepReports

SEEDS = range(12)
NEVER = 1000


def uniform(part):
    """Noise of a step's time, at most this part up or down."""
    return lambda generator, _: generator.uniform(1 - part, 1 + part)


def time_slices(generator, _):
    """Of a shared core: three steps in ten lose some, half of a step's time on average."""
    return 1 + (generator.expovariate(2) if generator.random() < 0.3 else 0)


def variable_samples(generator, samples):
    """Data of variable length: a third of the samples take four times as long."""
    return sum(generator.choice((0.5, 0.5, 2.0)) for _ in range(samples)) / samples


QUIET = uniform(0.0)


class Job:
    """Simulated ranks; plans take effect, and times are known, as late as in training."""

    warm_up, first_of_size, epoch, lag = 20.0, 1.0, None, 0

    def __init__(self, models, noise=QUIET, seed=0, batch=None, ahead=0, min_batch=1, **options):
        vars(self).update(options)
        self.random = random.Random(seed)
        self.models, self.noise, self.min_batch = models, noise, min_batch
        self.batch = batch or 32 * len(models)
        self.sizes = plan_equal(len(models), self.batch, min_batch)
        self.learner = CostLearner(self.sizes, min_batch, ahead)
        self.fetched = deque([self.sizes] * ahead)
        self.untimed = [deque() for _ in models]
        self.reported = None
        self.history = []
        self.learned_at = NEVER
        self.best_sec = self.seconds(plan_fastest(models, self.batch, min_batch))

    def seconds(self, sizes):
        return max(m.seconds(b) for m, b in zip(self.models, sizes, strict=True))

    def run(self, steps):
        for _ in range(steps):
            self.fetched.append(self.sizes)
            self.step(self.fetched.popleft())
        return self

    def step(self, sizes):
        if self.epoch and (len(self.history) + 1) % self.epoch == 0:
            sizes = [max(self.min_batch, b // 3) for b in sizes]  # the epoch's last step
        slow = 1.0 if sizes in self.history else self.first_of_size
        slow = slow if self.history else self.warm_up
        self.history.append(sizes)
        report = []
        for model, b, untimed in zip(self.models, sizes, self.untimed, strict=True):
            untimed.append(slow * model.seconds(b) * self.noise(self.random, b))
            report.append(self.rank_step(b, untimed))
        if self.reported:
            self.observe(self.reported)
        self.reported = report

    def rank_step(self, samples, untimed):
        """A device that is behind has finished some of its steps, or none."""
        left = self.random.randint(0, self.lag) if self.lag else 0
        done = [untimed.popleft() for _ in range(len(untimed) - left)]
        return (len(done), samples, mean(done) if done else 0.0, 0.0)

    def observe(self, steps):
        known = self.learner.costs is not None
        sizes = self.learner.observe(rank_steps(*steps))
        assert not (known and sizes)
        if self.learner.costs is not None and not known:
            self.learned_at = len(self.history)
        self.sizes = sizes or self.sizes
        assert (self.sizes, sum(self.sizes)) == (self.learner.batch_sizes, self.batch)
        assert min(self.sizes) >= self.min_batch

    def efficiency(self, step):
        """Return the speed of a step's split without noise, relative to the best split's."""
        return self.best_sec / self.seconds(self.history[step - 1])

    @property
    def steps_to_95(self):
        """The first step from which every one is at 95% of the best speed or more."""
        below = [s for s in range(1, len(self.history) + 1) if self.efficiency(s) < 0.95]
        last = max(below, default=0)
        return last + 1 if last < len(self.history) else NEVER


def models(slowness, alpha=0.02):
    return [RankCost(alpha * times, 0.01 * times) for times in slowness]


SHAPES = [([1, 3], 0.02), ([1, 3], 0.15), ([1, 2, 3, 5], 0.02), ([1, 2, 3, 5], 0.15)]


@pytest.mark.parametrize(("slowness", "alpha"), by_default(SHAPES, SHAPES[3:]))
def test_unlike_ranks_reach_the_best_speed_within_25_steps_and_soon_after_if_plans_come_late(
    slowness, alpha
):
    jobs = [Job(models(slowness, alpha), uniform(0.1), seed).run(30) for seed in SEEDS]
    steps = sorted(job.steps_to_95 for job in jobs)
    assert median(steps) <= 12
    assert steps[int(0.95 * len(steps))] <= 25
    assert min(job.efficiency(25) for job in jobs) > 0.93  # a sample more costs a slow rank 4%
    assert max(job.learned_at for job in jobs) <= 27
    jobs = [Job(models(slowness, alpha), uniform(0.1), seed, ahead=4).run(38) for seed in SEEDS]
    steps = sorted(job.steps_to_95 for job in jobs)
    is_hard = max(slowness) * alpha > 0.5  # a few samples for the slowest rank, at a high alpha
    assert median(steps) <= (29 if is_hard else 20)
    assert steps[int(0.9 * len(steps))] <= 29
    assert min(job.efficiency(25) for job in jobs) > 0.85
    assert median(job.efficiency(25) for job in jobs) > (0.93 if is_hard else 0.97)


@pytest.mark.parametrize("noise", [time_slices, *by_default([uniform(0.3), variable_samples], ())])
def test_strong_noise_costs_little(noise):
    jobs = [Job(models([1, 3]), noise, seed).run(40) for seed in SEEDS]
    assert median(job.steps_to_95 for job in jobs) <= 25
    assert mean(job.efficiency(25) for job in jobs) > 0.95
    assert min(job.efficiency(40) for job in jobs) > 0.85


def test_batches_at_most_double_and_slow_partial_or_late_steps_do_no_harm():
    job = Job(models([1, 3]), uniform(0.02), 3, warm_up=500.0, first_of_size=20.0).run(30)
    assert (job.steps_to_95 <= 12, job.learned_at < 25) == (True, True)
    for cost, model in zip(job.learner.costs, job.models, strict=True):
        assert cost.seconds(32) == pytest.approx(model.seconds(32), rel=0.03)
    job = Job(models([1, 3]), uniform(0.05), epoch=4).run(44)
    assert job.learner.costs is not None
    assert min(job.efficiency(s) for s in range(25, 45) if s % 4) > 0.95
    for batch in (1, 32):  # of a single rank
        job = Job(models([1]), batch=batch).run(30)
        assert job.history == [[batch]] * 30
        assert job.learner.costs[0].seconds(batch) == pytest.approx(job.seconds([batch]), rel=0.01)
    learner, never = CostLearner([32, 32], ahead=4), CostLearner([32, 32])
    for _ in range(100):
        learner.observe(rank_steps((1, 10, 0.1, 0.0), (1, 10, 0.3, 0.0)))
        assert never.observe(rank_steps((0, 32, 0.0, 0.0), (1, 32, 0.3, 0.0))) is None
    assert sum(learner.batch_sizes) == 64
    ratio = learner.costs[1].seconds(10) / learner.costs[0].seconds(10)
    assert ratio == pytest.approx(3, rel=0.01)
    assert never.costs is None, "one of its devices never reports"
    for slowness in ([1, *[20] * 15], [1] + [5] * 63, [1, 50]):
        job = Job(models(slowness)).run(45)
        largest = job.history[0]
        for sizes in job.history:
            assert all(new <= 2 * old for new, old in zip(sizes, largest, strict=True))
            largest = [max(pair) for pair in zip(sizes, largest, strict=True)]
        assert (job.efficiency(45) > 0.95, job.learned_at < 45) == (True, True)
    for seed in SEEDS:
        job = Job(models([1, 3]), uniform(0.02), seed, lag=3).run(60)
        assert job.steps_to_95 <= 40
        for cost, model in zip(job.learner.costs, job.models, strict=True):
            for samples in (16, 32, 48):
                assert cost.seconds(samples) == pytest.approx(model.seconds(samples), rel=0.06)


@pytest.mark.parametrize("slowness", [[1, 3], [1, 1], [1, 1, 1], [1] * 8, [1, 2, 3, 5], [1] * 64])
@pytest.mark.parametrize("part", [0.0, 0.25, 0.5])
def test_alpha_and_beta_are_told_apart(slowness, part):
    """Of a step at the equal share, alpha is this part."""
    true = [RankCost(part * times, (1 - part) / 32 * times) for times in slowness]
    job = Job(true, uniform(0.01), 1).run(30)
    assert job.learned_at < 20
    for cost, model in zip(job.learner.costs, true, strict=True):
        step_sec = model.seconds(32)
        assert cost.alpha_sec == pytest.approx(model.alpha_sec, abs=0.1 * step_sec)
        assert cost.beta_sec == pytest.approx(model.beta_sec, rel=0.15)
        assert cost.seconds(32) == pytest.approx(step_sec, rel=0.02)


@pytest.mark.parametrize("ranks", by_default([2, 3, 7, 64], [2, 7]))
@pytest.mark.parametrize("per_rank", by_default([1, 2, 3, 5], [1, 3]))
@pytest.mark.parametrize("min_batch", [1, 2])
def test_small_batches_end_in_a_sane_state(ranks, per_rank, min_batch):
    generator = random.Random(ranks)
    slowness = [generator.choice((1, 2, 3)) for _ in range(ranks)]
    batch = ranks * max(per_rank, min_batch) + 1
    job = Job(models(slowness), uniform(0.1), 0, batch, min_batch=min_batch).run(60)
    assert job.learner.costs is not None
    assert all(cost.beta_sec > 0 for cost in job.learner.costs)
    assert job.seconds(job.history[-1]) <= job.seconds(job.history[0]) * (1 + 1e-9)


def balancing(tmp_path, costs=None, adaptive=True):
    infos = [RankInfo(rank, rank, "node", "cpu", "cpu", "", 0, "2.8") for rank in range(2)]
    world = SimpleNamespace(size=2, rank=0, infos=infos, comm=None)
    loop = SimpleNamespace(world=world, plan=Plan([32, 32], [1.0, 1.0], costs, None))
    loop.shares = SimpleNamespace(workers=0)
    loop.sampler = SimpleNamespace(set_plan=list)
    loop.engine = SimpleNamespace(splits_shares=True)
    config = TrainConfig(balance="adaptive" if adaptive else "static")
    with patch.object(rebalancing, "gather_values", lambda _, value: [value] * 2):
        return Balancing(config, loop, DiskFolder(tmp_path), Sinks())


def reported(*rows):
    """Take (steps, samples, work_sec, wait_sec) of each rank."""
    return StepReports(rank_steps(*rows), np.zeros(2), np.zeros(2, dtype=bool))


def train(balance, steps, slowness=(1, 3), sizes=(32, 32), alpha=0.0):
    """Train with constant costs; return each change as (step, batch sizes)."""
    reports, changes = None, []
    for step in range(1, steps + 1):
        times = [(alpha + 0.01 * b) * s for b, s in zip(sizes, slowness, strict=True)]
        new = balance.observe(step, reports) if reports else None
        reports = reported(*((1, b, t, max(times) - t) for b, t in zip(sizes, times, strict=True)))
        if new is not None:
            changes.append((step, new))
            sizes = new
    return changes


def test_balancing_learns_first_then_follows(tmp_path, capfd):
    balance = balancing(tmp_path)
    assert balance.costs() is None
    changes = train(balance, 30)
    lines = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch_sizes"]) for line in lines] == changes
    assert balance.plans == 1 + len(changes)
    assert lines[0]["reason"] == "learning the cost of a step"
    assert lines[0]["predicted_gain"] > 0.5
    assert changes[0][0] == 6
    sec = [cost.seconds(32) for cost in balance.costs()]
    assert sec == [pytest.approx(0.32, rel=0.02), pytest.approx(0.96, rel=0.02)]
    assert balance.slow_ranks() == []
    assert (
        f"step 6: new plan {changes[0][1]}: learning the cost of a step" in capfd.readouterr().out
    )
    assert train(balance, 40, (3, 3), changes[-1][1])  # the rebalancer takes over


def test_plans_that_wait_for_batches_hold_once_these_are_dropped(tmp_path):
    """Else ranks with unequal numbers of workers would go on with different plans."""
    given = []
    balance = balancing(tmp_path)
    balance._set_plan = given.append
    balance._delay = 4
    step = SimpleNamespace(number=1)
    for step.number in range(1, 30):
        balance.step_done(step, reported((1, 32, 0.32, 0.64), (1, 32, 0.96, 0.0)))
        if balance._waiting:
            break
    assert given == []
    balance.shares_dropped()
    assert len(given) == 1
    assert given[0][0] > given[0][1]


def test_balancing_does_not_learn_what_is_known_and_judges_stragglers_by_learned_costs(tmp_path):
    costs = [RankCost(0.0, 0.01 * times) for times in (1, 3)]
    balance = balancing(tmp_path, costs)
    assert [cost.seconds(1) for cost in balance.costs()] == [0.01, pytest.approx(0.03)]
    train(balance, 30)
    assert "planned" in (tmp_path / "plan.jsonl").read_text()
    assert "learning" not in (tmp_path / "plan.jsonl").read_text()
    balance = balancing(tmp_path, adaptive=False)
    assert train(balance, 40) == []
    assert balance.costs() is None
    balance = balancing(tmp_path)
    train(balance, 40, slowness=(1, 1), alpha=0.3)
    for step in range(41, 81):  # for a rank, half the samples take three quarters of the time
        balance.observe(step, reported(*[(1, 16, 0.46, 0.0)] * 2))
    assert balance.slow_ranks() == []
