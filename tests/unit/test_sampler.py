"""LoadAdaptiveSampler: each sample once per epoch, whatever the plans."""

import random

import pytest

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler, shares_of_step, steps_per_epoch


def make_ranks(length, plan, epoch=0, **options):
    samplers = [LoadAdaptiveSampler(range(length), plan, n, **options) for n in range(len(plan))]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def take(samplers):
    """Return [step][rank] -> indices for the rest of the epoch."""
    return [list(step) for step in zip(*samplers, strict=True)]


def flat(steps):
    return [index for step in steps for indices in step for index in indices]


def sizes_of(step):
    return [len(part) for part in step]


def assert_known(sampler, steps):
    """Check that the sampler knows what every rank has taken in each of these steps."""
    position = 0
    for step in steps:
        assert sampler.shares_at(position) == sizes_of(step)
        position += sum(sizes_of(step))


def draw_plan(draw, ranks, min_batch=1):
    plan = [draw.choice([0, draw.randrange(min_batch, 20)]) for _ in range(ranks)]
    plan[draw.randrange(ranks)] += min_batch
    return plan


def test_the_order_depends_on_seed_and_epoch_and_shares_on_plans_from_the_next_step_on():
    for remaining, plan, min_batch, shares in (
        (100, [6, 3, 1], 1, [6, 3, 1]),
        (10, [6, 3, 1], 1, [6, 3, 1]),
        (5, [6, 3, 1], 1, [3, 2, 0]),
        (1, [6, 3, 1], 1, [1, 0, 0]),
        (0, [6, 3, 1], 1, [0, 0, 0]),
        (3, [0, 4], 1, [0, 3]),
        (6, [2, 2], 2, [2, 2]),
        (5, [2, 2], 2, [3, 2]),  # a remainder that is too small joins the step before
        (5, [2, 2], 1, [2, 2]),
        (3, [2, 2], 2, [3, 0]),
    ):
        assert shares_of_step(remaining, plan, min_batch) == shares
        lengths = 2, 4, 5, 6, 9, 10
        assert [steps_per_epoch(length, 4, 2) for length in lengths] == [1, 1, 1, 2, 2, 3]
    plans = [7], [3, 4], [0, 5, 2, 1]
    assert len({tuple(flat(take(make_ranks(50, plan)))) for plan in plans}) == 1
    pairs = [(seed, epoch) for seed in range(4) for epoch in range(4)]
    orders = [tuple(flat(take(make_ranks(40, [8], epoch, seed=seed)))) for seed, epoch in pairs]
    assert len(set(orders)) == 16
    unshuffled = take(make_ranks(7, [2, 1], shuffle=False))
    assert unshuffled == [[[0, 1], [2]], [[3, 4], [5]], [[6], []]]
    draw = random.Random(3)
    for _ in range(50):
        ranks, length = draw.randrange(1, 5), draw.randrange(1, 300)
        samplers = make_ranks(length, draw_plan(draw, ranks))
        taken, plan = [], samplers[0].batch_sizes
        for step in zip(*samplers, strict=True):
            assert sizes_of(step) == shares_of_step(length - len(flat(taken)), plan)
            taken.append(list(step))
            plan = draw_plan(draw, ranks)
            for sampler in samplers:
                sampler.set_plan(plan)
                assert sampler.global_batch_size == sum(plan)
        assert flat(taken) == flat(take(make_ranks(length, [length])))
        assert_known(samplers[-1], taken)  # what was fetched by earlier plans
    draw = random.Random(4)
    for _ in range(50):
        length, epoch = draw.randrange(2, 200), draw.randrange(3)
        before = make_ranks(length, draw_plan(draw, draw.randrange(1, 5)), epoch, seed=7)
        steps = zip(*before, strict=True)
        taken = [list(next(steps)) for _ in range(draw.randrange(len(before[0]) + 1))]
        states = [sampler.state_dict() for sampler in before]
        assert all(state == states[0] for state in states)
        after = make_ranks(length, draw_plan(draw, draw.randrange(1, 5)), seed=7)
        for sampler in after:
            sampler.load_state_dict(states[0])
            sampler.set_epoch(epoch)
        whole = make_ranks(length, [length], epoch, seed=7)
        assert flat(taken) + flat(take(after)) == flat(take(whole))


@pytest.mark.parametrize("min_batch", [1, 2, 3])
def test_every_epoch_contains_each_sample_once_and_no_batch_is_too_small(min_batch):
    draw = random.Random(min_batch)
    for _ in range(300):
        plan = draw_plan(draw, draw.randrange(1, 6), min_batch)
        length = draw.randrange(min_batch, 4 * sum(plan) + 2)
        options = {"shuffle": draw.random() < 0.5, "seed": draw.randrange(9)}
        samplers = make_ranks(length, plan, min_batch=min_batch, **options)
        steps = steps_per_epoch(length, sum(plan), min_batch)
        assert min_batch > 1 or steps == -(-length // sum(plan))
        assert {len(sampler) for sampler in samplers} == {steps}
        taken = take(samplers)
        assert (len(taken), sorted(flat(taken))) == (steps, list(range(length)))
        assert all(sizes_of(step) == plan for step in taken[:-1])
        assert {sampler.position for sampler in samplers} == {length}
        for size, most in zip(sizes_of(taken[-1]), plan, strict=True):
            assert size == 0 or min_batch <= size < most + min_batch
        assert_known(samplers[0], taken)


def test_an_epoch_restarts_or_continues_and_a_state_of_another_run_is_rejected():
    (sampler,), (resumed,) = make_ranks(10, [4]), make_ranks(10, [4])
    first = list(sampler)
    resumed.load_state_dict(sampler.state_dict())  # no step is left
    for epoch, steps in ((0, 0), (1, 3)):
        resumed.set_epoch(epoch)
        assert len(list(resumed)) == steps
    assert (len(sampler), list(sampler)) == (0, first)
    sampler.set_epoch(1)
    assert sampler.position == 0
    beginning = next(iter(sampler))
    assert (sampler.position, len(sampler)) == (4, 2)
    assert sorted(flat([[beginning, *sampler]])) == list(range(10))
    samplers = make_ranks(50, [4, 0, 6])
    for sampler in samplers:
        sampler.position = 20
    shares = take(each.first_shares(25) for each in samplers)  # of the epoch, and move nothing
    assert [sizes_of(step) for step in shares] == [[4, 0, 6], [4, 0, 6], [2, 0, 3]]
    assert flat(shares) == samplers[0].indices(0, 25)
    assert [sampler.position for sampler in samplers] == [20, 20, 20]
    (ahead,) = make_ranks(10, [4])
    whole = flat([list(ahead)])  # as workers do, before the last step is trained
    ahead.position = 8
    assert flat([list(ahead)]) == whole[8:]
    for length, options, message in (
        (10, {"seed": 1}, "seed 0, this run has 1"),
        (9, {}, "dataset length 10, this run has 9"),
        (10, {"shuffle": False}, "shuffle True, this run has False"),
    ):
        (saved,), (sampler,) = make_ranks(10, [4]), make_ranks(length, [4], **options)
        with pytest.raises(UserError, match=message):
            sampler.load_state_dict(saved.state_dict())
        assert sampler.position == 0


@pytest.mark.parametrize(
    ("length", "plan", "rank", "min_batch", "message"),
    [
        (10, [1, 1], 2, 1, "rank must be from 0 to 1, not 2"),
        (10, [1, 1], -1, 1, "rank must be from 0 to 1, not -1"),
        (10, [1, -1], 0, 1, r"not all 0: \[1, -1\]"),
        (10, [0, 0], 0, 1, r"not all 0: \[0, 0\]"),
        (1, [4], 0, 2, "dataset has 1 samples; give at least 2"),
        (9, [4, 1], 0, 2, r"of 0 or at least 2, and not all 0: \[4, 1\]"),
    ],
)
def test_invalid_arguments(length, plan, rank, min_batch, message):
    with pytest.raises(ValueError, match=message):
        LoadAdaptiveSampler(range(length), plan, rank, min_batch=min_batch)
    sampler = LoadAdaptiveSampler(range(10), [1, 2], 0)
    for invalid in ([4], [1, 2, 3], [0, 0], [3, -1]):
        with pytest.raises(ValueError, match="batch_sizes must be 2 numbers, one for each rank"):
            sampler.set_plan(invalid)
        assert sampler.batch_sizes == [1, 2]
