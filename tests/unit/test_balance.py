import itertools
import random

import pytest

from kaitian_mpi.balance.cost_model import CostModel, fit, is_settled, is_straight, scores
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.balance.planner import (
    plan_by_paper,
    plan_equal,
    plan_fastest,
    plan_fastest_within,
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
        ([4, 8], [0, 0], 12, [8, 4]),  # constants: by noise, so in proportion
    ],
)
def test_plan_fastest(alphas, betas, global_batch, expected):
    costs = [RankCost(CostModel(a, b)) for a, b in zip(alphas, betas, strict=True)]
    assert plan_fastest(costs, global_batch) == expected


def test_any_plan_sums_to_the_global_batch_and_a_faster_rank_gets_no_less():
    generator = random.Random(0)
    for _ in range(200):
        size = generator.randint(1, 40)
        betas = [generator.uniform(1e-4, 1.0) for _ in range(size)]
        total = generator.randint(size, 5_000)
        batches = plan_fastest([RankCost(CostModel(0.01, beta)) for beta in betas], total)
        assert sum(batches) == total
        assert min(batches) >= 1
        ordered = sorted(zip(betas, batches, strict=True))
        assert all(fast[1] + 1 >= slow[1] for fast, slow in itertools.pairwise(ordered))


def test_the_fastest_plan_within_limits_is_the_fastest_of_all_these():
    generator = random.Random(0)
    for _ in range(60):
        costs = [
            RankCost(CostModel(generator.uniform(0, 3), generator.uniform(0.1, 2)))
            for _ in range(3)
        ]
        most = [generator.randint(2, 12), generator.randint(2, 12), None]
        min_batch = generator.choice([1, 2])
        batches = plan_fastest_within(costs, 16, most, min_batch)
        assert sum(batches) == 16

        def seconds(split, costs=costs):
            return max(cost.seconds(b) for cost, b in zip(costs, split, strict=True))

        allowed = [
            (a, b, 16 - a - b)
            for a in range(min_batch, most[0] + 1)
            for b in range(min_batch, most[1] + 1)
            if 16 - a - b >= min_batch
        ]
        assert tuple(batches) in allowed
        assert seconds(batches) == pytest.approx(min(map(seconds, allowed)))


def test_limits_below_the_global_batch_are_refused():
    with pytest.raises(ValueError, match="most must be at least 8 in all, not 7"):
        plan_fastest_within([RankCost(CostModel(0, 1))] * 2, 8, [3, 4])


@pytest.mark.parametrize("batch", [7, 11, 32])
def test_a_fit_to_one_batch_size_goes_through_the_origin(batch):
    model = fit([batch] * 3, [0.3, 0.31, 0.37])
    assert model.alpha_sec == 0
    assert model.seconds(batch) == pytest.approx(0.32, rel=0.05)


def test_plan_equal():
    assert plan_equal(4, 256) == [64] * 4
    assert plan_equal(3, 10) == [4, 3, 3]


def test_fewer_samples_than_ranks_is_a_user_error():
    for plan in (
        lambda: plan_equal(4, 2),
        lambda: plan_fastest([RankCost(CostModel(0, 1))] * 4, 2),
    ):
        with pytest.raises(UserError, match=r"--global-batch-size 2 is too small for 4 ranks"):
            plan()


def test_a_global_batch_below_the_sum_of_minimums_is_a_user_error():
    for plan in (
        lambda: plan_equal(4, 7, 2),
        lambda: plan_fastest([RankCost(CostModel(0, 1))] * 4, 7, 2),
    ):
        with pytest.raises(
            UserError, match=r"7 is too small for 4 ranks, .* at least 2 samples .* 8"
        ):
            plan()
    assert plan_equal(4, 8, 2) == [2, 2, 2, 2]


def test_plan_by_the_papers_formula():
    assert plan_by_paper([1.0, 1.0, 0.33, 0.001], 64) == [64, 64, 21, 1]
    assert plan_by_paper([1.0, 0.001], 64, min_batch=2) == [64, 2]


def test_scores():
    assert scores([2.0, 1.0, 4.0]) == [0.5, 1.0, 0.25]


@pytest.mark.parametrize(
    ("batches", "seconds", "expected"),
    [
        ([10, 20], [1.5, 2.5], CostModel(0.5, 0.1)),
        ([10, 20, 30], [1.5, 2.5, 3.5], CostModel(0.5, 0.1)),
        ([8], [0.8], CostModel(0.0, 0.1)),
        ([10, 20], [1.0, 3.0], CostModel(0.0, 30 / (100 + 400 / 3))),  # would start below zero
        ([10, 20], [2.0, 1.0], CostModel(4 / 3 - 0.0125 * 50 / 3, 0.0125)),  # would fall
        ([10, 20], [1.0, 1.0], CostModel(0.8125, 0.0125)),  # would be flat
    ],
)
def test_fit_of_the_cost_model(batches, seconds, expected):
    model = fit(batches, seconds)
    assert model.alpha_sec == pytest.approx(expected.alpha_sec)
    assert model.beta_sec == pytest.approx(expected.beta_sec)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([8, 16], False),  # any two are on a line
        ([8, 16, 32], True),
        ([10, 18, 34], True),
        ([8, 16, 32.8], True),
        ([8, 16, 33.5], False),  # 4% more than the smaller ones predict
        ([8, 16, 30], False),
        ([9, 14, 33, 66], False),
    ],
)
def test_more_sizes_are_timed_until_the_line_predicts_the_largest(seconds, expected):
    assert is_straight([8 << i for i in range(len(seconds))], seconds) == expected


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
