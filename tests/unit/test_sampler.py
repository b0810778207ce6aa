"""LoadAdaptiveSampler: each sample once per epoch, whatever the plans."""

from __future__ import annotations

import random

import pytest

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.sampler import (
    LoadAdaptiveSampler,
    samples_of_step,
    shares_of_step,
    steps_per_epoch,
)


def make_ranks(
    length: int, plan: list[int], *, shuffle: bool = True, seed: int = 0
) -> list[LoadAdaptiveSampler]:
    return [
        LoadAdaptiveSampler(range(length), plan, rank, shuffle=shuffle, seed=seed)
        for rank in range(len(plan))
    ]


def take(samplers: list[LoadAdaptiveSampler]) -> list[list[list[int]]]:
    """Return [step][rank] -> indices for the rest of the epoch."""
    return [list(step) for step in zip(*samplers, strict=True)]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for indices in step for index in indices]


def draw_plan(draw: random.Random, ranks: int) -> list[int]:
    plan = [draw.choice([0, draw.randrange(1, 20)]) for _ in range(ranks)]
    plan[draw.randrange(ranks)] += 1
    return plan


@pytest.mark.parametrize(
    ("remaining", "plan", "shares"),
    [
        (100, [6, 3, 1], [6, 3, 1]),
        (10, [6, 3, 1], [6, 3, 1]),
        (5, [6, 3, 1], [3, 2, 0]),
        (1, [6, 3, 1], [1, 0, 0]),
        (0, [6, 3, 1], [0, 0, 0]),
        (3, [0, 4], [0, 3]),
    ],
)
def test_shares_of_step(remaining: int, plan: list[int], shares: list[int]) -> None:
    assert shares_of_step(remaining, plan) == shares


def test_every_epoch_contains_each_sample_once() -> None:
    draw = random.Random(0)
    for _ in range(100):
        length, plan = draw.randrange(1, 200), draw_plan(draw, draw.randrange(1, 6))
        samplers = make_ranks(length, plan, shuffle=draw.random() < 0.5, seed=draw.randrange(9))
        steps = -(-length // sum(plan))
        assert [len(sampler) for sampler in samplers] == [steps] * len(plan)
        taken = take(samplers)
        assert len(taken) == steps
        assert sorted(flat(taken)) == list(range(length))
        assert all([len(part) for part in step] == plan for step in taken[:-1])
        assert {sampler.position for sampler in samplers} == {length}


@pytest.mark.parametrize("min_batch", [2, 3])
def test_no_batch_is_below_the_minimum(min_batch: int) -> None:
    draw = random.Random(min_batch)
    for _ in range(300):
        ranks = draw.randrange(1, 6)
        plan = [draw.choice([0, draw.randrange(min_batch, 9)]) for _ in range(ranks)]
        plan[draw.randrange(ranks)] += min_batch
        length = draw.randrange(min_batch, 4 * sum(plan) + 2)
        samplers = [
            LoadAdaptiveSampler(range(length), plan, rank, min_batch=min_batch)
            for rank in range(ranks)
        ]
        steps = steps_per_epoch(length, sum(plan), min_batch)
        assert {len(sampler) for sampler in samplers} == {steps}
        taken = take(samplers)
        assert len(taken) == steps
        assert sorted(flat(taken)) == list(range(length))
        position = 0
        for step in taken:
            sizes = [len(part) for part in step]
            assert all(size == 0 or size >= min_batch for size in sizes)
            assert all(size < most + min_batch for size, most in zip(sizes, plan, strict=True))
            assert sizes == samplers[0].shares_at(position)
            position += sum(sizes)


def test_a_remainder_that_is_too_small_joins_the_step_before() -> None:
    assert [samples_of_step(left, 4, 2) for left in (9, 6, 5, 4, 3, 2, 0)] == [4, 4, 5, 4, 3, 2, 0]
    assert [samples_of_step(left, 4) for left in (9, 5, 4, 1)] == [4, 4, 4, 1]
    assert shares_of_step(5, [2, 2], 2) == [3, 2]
    assert [steps_per_epoch(length, 4, 2) for length in (2, 4, 5, 6, 9, 10)] == [
        1,
        1,
        1,
        2,
        2,
        3,
    ]
    with pytest.raises(ValueError, match="dataset has 1 samples; give at least 2"):
        LoadAdaptiveSampler(range(1), [4], 0, min_batch=2)
    with pytest.raises(ValueError, match=r"must each be 0 or at least 2: \[4, 1\]"):
        LoadAdaptiveSampler(range(9), [4, 1], 0, min_batch=2)


def test_the_sample_order_does_not_depend_on_the_split() -> None:
    orders = {tuple(flat(take(make_ranks(50, plan)))) for plan in ([7], [3, 4], [0, 5, 2, 1])}
    assert len(orders) == 1


def test_without_shuffling_the_data_sets_order_is_kept() -> None:
    assert take(make_ranks(7, [2, 1], shuffle=False)) == [
        [[0, 1], [2]],
        [[3, 4], [5]],
        [[6], []],
    ]


def test_order_differs_between_seeds_and_epochs() -> None:
    orders = set()
    for seed in range(4):
        for epoch in range(4):
            samplers = make_ranks(40, [8], seed=seed)
            samplers[0].set_epoch(epoch)
            orders.add(tuple(flat(take(samplers))))
    assert len(orders) == 16


def test_a_new_plan_applies_from_the_next_step() -> None:
    draw = random.Random(3)
    for _ in range(50):
        ranks, length = draw.randrange(1, 5), draw.randrange(1, 300)
        samplers = make_ranks(length, draw_plan(draw, ranks))
        taken: list[list[list[int]]] = []
        plan = samplers[0].batch_sizes
        for step in zip(*samplers, strict=True):
            left = length - len(flat(taken))
            assert [len(part) for part in step] == shares_of_step(left, plan)
            taken.append(list(step))
            plan = draw_plan(draw, ranks)
            for sampler in samplers:
                sampler.set_plan(plan)
                assert sampler.global_batch_size == sum(plan)
        assert flat(taken) == flat(take(make_ranks(length, [length])))
        position = 0  # what was fetched by earlier plans is still known
        for step in taken:
            sizes = [len(part) for part in step]
            assert samplers[-1].shares_at(position) == sizes
            position += sum(sizes)


def test_an_epoch_restarts_after_its_end_and_continues_after_a_break() -> None:
    (sampler,) = make_ranks(10, [4])
    first = list(sampler)
    assert len(sampler) == 0
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sampler.position == 0
    steps = iter(sampler)
    beginning = next(steps)
    assert sampler.position == 4
    assert len(sampler) == 2
    rest = list(sampler)
    assert sorted(flat([[beginning, *rest]])) == list(range(10))


def test_resume_with_another_number_of_ranks() -> None:
    draw = random.Random(4)
    for _ in range(50):
        length, epoch = draw.randrange(2, 200), draw.randrange(3)
        before = make_ranks(length, draw_plan(draw, draw.randrange(1, 5)), seed=7)
        for sampler in before:
            sampler.set_epoch(epoch)
        steps = zip(*before, strict=True)
        taken = [list(next(steps)) for _ in range(draw.randrange(len(before[0]) + 1))]
        states = [sampler.state_dict() for sampler in before]
        assert all(state == states[0] for state in states)
        after = make_ranks(length, draw_plan(draw, draw.randrange(1, 5)), seed=7)
        for sampler in after:
            sampler.load_state_dict(states[0])
            sampler.set_epoch(epoch)
        whole = make_ranks(length, [length], seed=7)
        whole[0].set_epoch(epoch)
        assert flat(taken) + flat(take(after)) == flat(take(whole))


def test_a_state_from_the_end_of_an_epoch_has_no_steps_left() -> None:
    (done,) = make_ranks(10, [4])
    list(done)
    (sampler,) = make_ranks(10, [4])
    sampler.load_state_dict(done.state_dict())
    sampler.set_epoch(0)
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) == 3


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (LoadAdaptiveSampler(range(10), [4], 0, seed=1), "seed 0, this run has 1"),
        (LoadAdaptiveSampler(range(9), [4], 0), "dataset length 10, this run has 9"),
        (LoadAdaptiveSampler(range(10), [4], 0, shuffle=False), "shuffle True, this run has False"),
    ],
)
def test_a_state_of_another_run_is_rejected(sampler: LoadAdaptiveSampler, message: str) -> None:
    state = LoadAdaptiveSampler(range(10), [4], 0).state_dict()
    with pytest.raises(UserError, match=message):
        sampler.load_state_dict(state)
    assert sampler.position == 0


@pytest.mark.parametrize(
    ("plan", "rank", "message"),
    [
        ([1, 1], 2, "rank must be from 0 to 1, not 2"),
        ([1, 1], -1, "rank must be from 0 to 1, not -1"),
        ([1, -1], 0, r"not all 0: \[1, -1\]"),
        ([0, 0], 0, r"not all 0: \[0, 0\]"),
    ],
)
def test_invalid_arguments(plan: list[int], rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadAdaptiveSampler(range(10), plan, rank)


@pytest.mark.parametrize("plan", [[4], [1, 2, 3], [0, 0], [3, -1]])
def test_an_invalid_plan_changes_nothing(plan: list[int]) -> None:
    sampler = LoadAdaptiveSampler(range(10), [1, 2], 0)
    with pytest.raises(ValueError, match=r"batch_sizes (has|must)"):
        sampler.set_plan(plan)
    assert sampler.batch_sizes == [1, 2]


def test_first_shares_are_the_first_samples_and_move_nothing() -> None:
    samplers = make_ranks(50, [4, 0, 6])
    for sampler in samplers:
        sampler.position = 20
    shares = [list(step) for step in zip(*(s.first_shares(25) for s in samplers), strict=True)]
    assert [[len(own) for own in step] for step in shares] == [[4, 0, 6], [4, 0, 6], [2, 0, 3]]
    assert flat(shares) == samplers[0].indices(0, 25)
    assert [sampler.position for sampler in samplers] == [20, 20, 20]
