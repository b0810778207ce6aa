import pytest

from kaitian_mpi.balance.cost_model import RankCost, fit, is_settled, scores
from kaitian_mpi.balance.shares import (
    plan_by_paper,
    plan_equal,
    plan_fastest,
)
from kaitian_mpi.errors import UserError


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


def test_plan_equal():
    assert plan_equal(4, 256) == [64] * 4
    assert plan_equal(3, 10) == [4, 3, 3]


@pytest.mark.parametrize(
    ("total", "min_batch", "said"),
    [(2, 1, "2 is too small for 4 ranks"), (7, 2, "7 is too small for 4 ranks, .* least 2 .* 8")],
)
def test_a_global_batch_that_is_too_small_is_a_user_error(total, min_batch, said):
    for ranks, plan in ((4, plan_equal), ([RankCost(0, 1)] * 4, plan_fastest)):
        with pytest.raises(UserError, match=said):
            plan(ranks, total, min_batch)
    assert plan_equal(4, 8, 2) == [2, 2, 2, 2]


def test_less_memory_than_the_batch_takes_at_once_is_a_user_error():
    costs = [RankCost(0, 1)] * 2
    assert plan_fastest(costs, 7, most=[3, 4]) == [3, 4]
    assert plan_fastest(costs, 8, most=[3, None]) == [3, 5]
    with pytest.raises(UserError, match=r"--sync-bn .* 8 the ranks' memory holds 7 samples"):
        plan_fastest(costs, 8, most=[3, 4])


def test_plan_by_the_papers_formula():
    assert plan_by_paper([1.0, 1.0, 0.33, 0.001], 64) == [64, 64, 21, 1]
    assert plan_by_paper([1.0, 0.001], 64, min_batch=2) == [64, 2]


def test_scores():
    assert scores([2.0, 1.0, 4.0]) == [0.5, 1.0, 0.25]


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
