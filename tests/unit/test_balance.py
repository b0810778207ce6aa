import itertools
import random

import pytest

from kaitian_mpi.balance.cost_model import CostModel, fit, scores
from kaitian_mpi.balance.planner import plan_batches, plan_batches_as_paper
from kaitian_mpi.errors import UserError


@pytest.mark.parametrize(
    ("rank_scores", "global_batch", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 256, [64, 64, 64, 64]),
        ([1.0, 1.0, 1 / 3, 1 / 3], 256, [96, 96, 32, 32]),
        ([1.0], 7, [7]),
        ([1.0, 0.001], 10, [9, 1]),
        ([1.0, 1.0, 1.0], 10, [4, 3, 3]),
        ([0.5, 1.0], 2, [1, 1]),
    ],
)
def test_shares_follow_scores(rank_scores, global_batch, expected):
    assert plan_batches(rank_scores, global_batch) == expected


def test_any_plan_sums_to_the_global_batch_and_a_faster_rank_gets_no_less():
    generator = random.Random(0)
    for _ in range(500):
        size = generator.randint(1, 40)
        rank_scores = [generator.uniform(1e-4, 1.0) for _ in range(size)]
        total = generator.randint(size, 5_000)
        batches = plan_batches(rank_scores, total)
        assert sum(batches) == total
        assert min(batches) >= 1
        ordered = sorted(zip(rank_scores, batches, strict=True))
        assert all(low[1] <= high[1] + 1 for low, high in itertools.pairwise(ordered))


def test_fewer_samples_than_ranks_is_the_users_mistake():
    with pytest.raises(UserError, match=r"--global-batch-size: found 2 for 4 ranks, needed"):
        plan_batches([1.0] * 4, 2)


def test_the_papers_rule():
    assert plan_batches_as_paper([1.0, 1.0, 0.33, 0.001], 64) == [64, 64, 21, 1]


def test_scores():
    assert scores([2.0, 1.0, 4.0]) == [0.5, 1.0, 0.25]


@pytest.mark.parametrize(
    ("batches", "seconds", "expected"),
    [
        ([10, 20], [1.5, 2.5], CostModel(0.5, 0.1)),
        ([10, 20, 30], [1.5, 2.5, 3.5], CostModel(0.5, 0.1)),
        ([8], [0.8], CostModel(0.0, 0.1)),
        ([10, 20], [1.0, 3.0], CostModel(0.0, 0.14)),  # would start below zero
        ([10, 20], [2.0, 1.0], CostModel(1.5, 0.0)),  # would fall
    ],
)
def test_fit(batches, seconds, expected):
    model = fit(batches, seconds)
    assert model.alpha_sec == pytest.approx(expected.alpha_sec)
    assert model.beta_sec == pytest.approx(expected.beta_sec)
