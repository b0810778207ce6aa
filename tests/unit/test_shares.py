"""The cost model, and samples in integer shares."""

import itertools
import math
import random

import pytest

from kaitian_mpi.balance.cost_model import RankCost, fit, is_settled, scores
from kaitian_mpi.balance.shares import (
    apportion,
    merge_small,
    plan_by_paper,
    plan_equal,
    plan_fastest,
    split_micro_batches,
)
from kaitian_mpi.errors import UserError


def test_apportion():
    for total, weights, shares in (
        *((10, [1], [10]), (0, [1, 2], [0, 0]), (10, [1, 1], [5, 5])),
        *((10, [1, 1, 1], [4, 3, 3]), (11, [1, 1, 1], [4, 4, 3])),  # ties go to the lower index
        *((1, [0, 0, 3], [0, 0, 1]), (5, [0, 1, 0, 1], [0, 3, 0, 2])),
        *((256, [1.0, 0.5, 0.25, 0.25], [128, 64, 32, 32]), (7, [0.1, 0.2, 0.7], [1, 1, 5])),
    ):
        assert apportion(total, weights) == shares


def test_shares_sum_to_the_total_and_stay_within_one_of_the_quota():
    draw = random.Random(0)
    for _ in range(500):
        weights = [draw.choice([0, draw.random(), 1e6 * draw.random()]) for _ in range(8)] + [0.5]
        total = draw.randrange(10_000)
        shares = apportion(total, weights)
        assert sum(shares) == total
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - total * weight / math.fsum(weights)) < 1 + 1e-6
            assert weight > 0 or share == 0


def test_micro_batches_are_equal_to_within_one_and_neither_too_large_nor_too_small():
    for samples, most, min_batch, known in (
        *((10, None, 1, [10]), (0, 4, 1, [0]), (10, 4, 1, [4, 3, 3]), (5, 2, 2, [3, 2])),
        *((3, 2, 2, [3]), (1, 2, 2, [1]), (0, 2, 2, [0])),  # no part smaller than the share
    ):
        assert split_micro_batches(samples, most, min_batch) == known
    for min_batch, samples, most in itertools.product((1, 2), range(1, 50), range(1, 12)):
        if min(samples, most) < min_batch:
            continue
        parts = split_micro_batches(samples, most, min_batch)
        assert sum(parts) == samples
        assert max(parts) - min(parts) <= 1
        assert min_batch <= min(parts) <= max(parts) <= max(most, 2 * min_batch - 1)
        if most >= 2 * min_batch - 1:
            assert len(parts) == -(-samples // most)


def test_shares_that_are_too_small_are_merged():
    for shares, planned, min_batch, merged in (
        ([4, 4, 1, 1], [96, 96, 32, 32], 2, [4, 4, 2, 0]),
        ([4, 4, 1, 1, 1], [9, 9, 3, 3, 4], 2, [5, 4, 0, 0, 2]),
        ([1, 1, 1], [2, 2, 2], 2, [3, 0, 0]),
        ([1, 0, 1], [2, 5, 4], 2, [0, 0, 2]),
        ([0, 1], [2, 2], 2, [0, 1]),  # nothing can be done
        ([2, 2, 3], [3, 3, 3], 3, [4, 0, 3]),
        ([5, 0, 2], [5, 0, 2], 2, [5, 0, 2]),
    ):
        assert merge_small(shares, planned, min_batch) == merged


@pytest.mark.parametrize(
    ("alphas", "betas", "global_batch", "expected"),
    [
        ([0, 0, 0, 0], [1, 1, 1, 1], 256, [64, 64, 64, 64]),
        ([0, 0, 0, 0], [1, 1, 3, 3], 256, [96, 96, 32, 32]),
        ([0], [1], 7, [7]),
        ([0, 0], [1, 1000], 10, [9, 1]),  # at least one each
        ([0, 10], [1, 1], 50, [30, 20]),  # both end at 30
        ([0, 0, 0], [1, 1, 1000], 21, [10, 10, 1]),  # and what it costs is taken from the last
    ],
)
def test_plan_fastest(alphas, betas, global_batch, expected):
    costs = [RankCost(a, b) for a, b in zip(alphas, betas, strict=True)]
    assert plan_fastest(costs, global_batch) == expected


def test_a_global_batch_that_is_too_small_or_takes_too_much_memory_is_a_user_error():
    for total, min_batch, said in (
        (2, 1, "2 is too small for 4 ranks"),
        (7, 2, "7 is too small for 4 ranks, .* least 2 .* 8"),
    ):
        for ranks, plan in ((4, plan_equal), ([RankCost(0, 1)] * 4, plan_fastest)):
            with pytest.raises(UserError, match=said):
                plan(ranks, total, min_batch)
    assert plan_equal(4, 8, 2) == [2, 2, 2, 2]
    assert plan_equal(3, 10) == [4, 3, 3]
    costs = [RankCost(0, 1)] * 2
    assert plan_fastest(costs, 7, most=[3, 4]) == [3, 4]
    assert plan_fastest(costs, 8, most=[3, None]) == [3, 5]
    with pytest.raises(UserError, match=r"--sync-bn .* only 7 of 8 samples fit in the ranks' mem"):
        plan_fastest(costs, 8, most=[3, 4])


def test_plan_by_the_papers_formula():
    assert scores([2.0, 1.0, 4.0]) == [0.5, 1.0, 0.25]
    assert plan_by_paper([1.0, 1.0, 0.33, 0.001], 64) == [64, 64, 21, 1]
    assert plan_by_paper([1.0, 0.001], 64, min_batch=2) == [64, 2]


@pytest.mark.parametrize(
    ("batches", "seconds", "expected"),
    [
        ([10, 20], [1.5, 2.5], RankCost(0.5, 0.1)),
        ([10, 20, 30], [1.5, 2.5, 3.5], RankCost(0.5, 0.1)),
        ([8], [0.8], RankCost(0.0, 0.1)),
        ([10, 20], [1.0, 3.0], RankCost(0.0, 30 / (100 + 400 / 3))),  # would start below zero
        ([10, 20], [2.0, 1.0], RankCost(4 / 3 - 0.0125 * 50 / 3, 0.0125)),  # would fall
        ([10, 20], [1.0, 1.0], RankCost(0.8125, 0.0125)),  # would be flat
    ],
)
def test_fit_of_the_cost_model(batches, seconds, expected):
    model = fit(batches, seconds)
    assert model.alpha_sec == pytest.approx(expected.alpha_sec)
    assert model.beta_sec == pytest.approx(expected.beta_sec)


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [
        ([1.0], [4.0], False),  # a single round shows no spread
        ([1.0, 1.0], [4.0, 4.0], True),
        ([1.0, 1.02], [4.0, 4.08], True),  # another round moves each by 1% at most
        ([1.0, 1.1], [4.0, 4.4], False),
        ([1.0, 1.05, 1.1], [4.0, 4.2, 4.4], True),  # by half a gap, 2.4%
        ([1.0, 1.1, 1.2], [4.0, 4.4, 4.8], False),
        ([1.0, 1.0, 9.0], [4.0, 4.0, 9.0], False),  # one more slow one, and the median is high
        ([1.0, 1.0, 1.0, 9.0], [4.0, 4.0, 4.0, 9.0], True),  # a single slow one does not matter
        ([3.0, 3.3], [8.0, 8.1], True),  # the small size hardly matters for a large share
    ],
)
def test_rounds_end_when_another_one_cannot_change_the_step_by_3_percent(small, large, expected):
    assert is_settled({8: small, 32: large}, 32) == expected
