"""The cost model, samples in integer shares, and the optimal split of them."""

import itertools
import math
import random
import time

import numpy as np
import pytest
from choices import by_default

from kaitian_mpi.balance.cost_model import CostTable, RankCost, fit, is_settled, scores
from kaitian_mpi.balance.fastest_split import fastest_split, plan_fastest, split_cohorts
from kaitian_mpi.balance.shares import (
    apportion,
    merge_small,
    plan_by_paper,
    plan_equal,
    split_micro_batches,
)
from kaitian_mpi.errors import UserError


def test_shares_and_micro_batches_sum_to_the_total_and_small_ones_are_merged():
    for total, weights, shares in (
        *((10, [1], [10]), (0, [1, 2], [0, 0]), (10, [1, 1], [5, 5])),
        *((10, [1, 1, 1], [4, 3, 3]), (11, [1, 1, 1], [4, 4, 3])),  # ties go to the lower index
        *((1, [0, 0, 3], [0, 0, 1]), (5, [0, 1, 0, 1], [0, 3, 0, 2])),
        *((256, [1.0, 0.5, 0.25, 0.25], [128, 64, 32, 32]), (7, [0.1, 0.2, 0.7], [1, 1, 5])),
    ):
        assert apportion(total, weights) == shares
    draw = random.Random(0)
    for _ in range(500):
        weights = [draw.choice([0, draw.random(), 1e6 * draw.random()]) for _ in range(8)] + [0.5]
        total = draw.randrange(10_000)
        shares = apportion(total, weights)
        assert sum(shares) == total
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - total * weight / math.fsum(weights)) < 1 + 1e-6
            assert weight > 0 or share == 0
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


def test_plans_of_a_global_batch_and_one_too_small_or_too_large_for_the_memory():
    for alphas, betas, global_batch, expected in (
        ([0, 0, 0, 0], [1, 1, 1, 1], 256, [64, 64, 64, 64]),
        ([0, 0, 0, 0], [1, 1, 3, 3], 256, [96, 96, 32, 32]),
        ([0], [1], 7, [7]),
        ([0, 0], [1, 1000], 10, [9, 1]),  # at least one each
        ([0, 10], [1, 1], 50, [30, 20]),  # both end at 30
        ([0, 0, 0], [1, 1, 1000], 21, [10, 10, 1]),  # and what it costs is taken from the last
    ):
        costs = [RankCost(a, b) for a, b in zip(alphas, betas, strict=True)]
        assert plan_fastest(costs, global_batch) == expected
    assert scores([2.0, 1.0, 4.0]) == [0.5, 1.0, 0.25]
    assert plan_by_paper([1.0, 1.0, 0.33, 0.001], 64) == [64, 64, 21, 1]
    assert plan_by_paper([1.0, 0.001], 64, min_batch=2) == [64, 2]
    for total, min_batch, said in (
        (2, 1, "2 is too small for 4 ranks"),
        (7, 2, "7 is too small for 4 ranks, .* least 2 .* 8"),
    ):
        for ranks, plan in ((4, plan_equal), ([RankCost(0, 1)] * 4, plan_fastest)):
            with pytest.raises(UserError, match=said):
                plan(ranks, total, min_batch)
    assert (plan_equal(4, 8, 2), plan_equal(3, 10)) == ([2, 2, 2, 2], [4, 3, 3])
    costs = [RankCost(0, 1)] * 2
    assert plan_fastest(costs, 7, most=[3, 4]) == [3, 4]
    assert plan_fastest(costs, 8, most=[3, None]) == [3, 5]
    with pytest.raises(UserError, match=r"--sync-bn .* only 7 of 8 samples fit in the ranks' mem"):
        plan_fastest(costs, 8, most=[3, 4])


def test_the_cost_model_is_fitted():
    for batches, seconds, expected in (
        ([10, 20], [1.5, 2.5], RankCost(0.5, 0.1)),
        ([10, 20, 30], [1.5, 2.5, 3.5], RankCost(0.5, 0.1)),
        ([8], [0.8], RankCost(0.0, 0.1)),
        ([10, 20], [1.0, 3.0], RankCost(0.0, 30 / (100 + 400 / 3))),  # would start below zero
        ([10, 20], [2.0, 1.0], RankCost(4 / 3 - 0.0125 * 50 / 3, 0.0125)),  # would fall
        ([10, 20], [1.0, 1.0], RankCost(0.8125, 0.0125)),  # would be flat
    ):
        model = fit(batches, seconds)
        assert model.alpha_sec == pytest.approx(expected.alpha_sec)
        assert model.beta_sec == pytest.approx(expected.beta_sec)


def test_rounds_end_when_another_cannot_change_the_model_by_3_percent():
    for small, large, expected in (
        ([1.0], [4.0], False),  # a single round shows no spread
        ([1.0, 1.0], [4.0, 4.0], True),
        ([1.0, 1.02], [4.0, 4.08], True),  # another round moves each by 1% at most
        ([1.0, 1.1], [4.0, 4.4], False),
        ([1.0, 1.05, 1.1], [4.0, 4.2, 4.4], True),  # by half a gap, 2.4%
        ([1.0, 1.1, 1.2], [4.0, 4.4, 4.8], False),
        ([1.0, 1.0, 9.0], [4.0, 4.0, 9.0], False),  # one more slow one, and the median is high
        ([1.0, 1.0, 1.0, 9.0], [4.0, 4.0, 4.0, 9.0], True),  # a single slow one does not matter
        ([3.0, 3.3], [8.0, 8.1], True),  # the small size hardly matters for a large share
    ):
        assert is_settled({8: small, 32: large}, 32) == expected


def slowest(costs, shares):
    return max(one.seconds(share) for one, share in zip(costs, shares, strict=True))


def every_split(ranks, total):
    for cuts in itertools.combinations_with_replacement(range(total + 1), ranks - 1):
        ends = (0, *cuts, total)
        yield [after - before for before, after in itertools.pairwise(ends)]


def random_costs(chance, ranks):
    return [
        RankCost(
            chance.choice([0, 0.5, chance.random() * 5]),
            chance.choice([0.1, 1, chance.random() * 3]),
            chance.choice([None, 1, 2, 5]),
        )
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("least", [0, 1, 2])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seed", by_default(range(50), range(6)))
def test_no_split_is_faster_than_the_optimum(seed, least, limited):
    chance = random.Random(seed)
    costs = random_costs(chance, chance.randint(1, 4))
    total = chance.randint(least * len(costs), 14)
    most = [total] * len(costs)
    if limited:
        most = [chance.randint(least, total) for _ in costs]
        most[0] = max(most[0], total - sum(most[1:]))
    shares = fastest_split(costs, total, least, most if limited else None)
    allowed = [
        split
        for split in every_split(len(costs), total)
        if all(least <= share <= limit for share, limit in zip(split, most, strict=True))
    ]
    assert shares in allowed
    best = min(slowest(costs, split) for split in allowed)
    assert slowest(costs, shares) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", by_default(range(40), range(6)))
def test_the_ranks_can_process_a_batch_in_the_time_of_its_fastest_split_and_not_sooner(seed):
    chance = random.Random(seed)
    costs = random_costs(chance, chance.randint(1, 4))
    total = chance.randint(1, 30)
    seconds = slowest(costs, fastest_split(costs, total))
    table = CostTable.from_costs(costs)
    assert table.costs() == costs
    assert table.within(seconds * (1 + 1e-9), total).sum() >= total
    assert table.within(seconds * (1 - 1e-9), total).sum() < total


@pytest.mark.parametrize("seed", by_default(range(40), range(6)))
def test_cohorts_take_as_long_as_their_ranks_listed_singly(seed):
    chance = random.Random(seed)
    costs, ranks = random_costs(chance, 4), [chance.randint(1, 7) for _ in range(4)]
    total = chance.randint(0, 200)
    samples, fewer = split_cohorts(CostTable.from_costs(costs), np.array(ranks), total)
    assert (samples * ranks - fewer).sum() == total
    assert min(samples - (fewer > 0)) >= 0
    assert ((fewer >= 0) & (fewer <= ranks)).all()
    together = max(
        cost.seconds(share - (count == less))
        for cost, share, count, less in zip(costs, samples.tolist(), ranks, fewer, strict=True)
    )
    apart = [cost for cost, count in zip(costs, ranks, strict=True) for _ in range(count)]
    assert together == pytest.approx(slowest(apart, fastest_split(apart, total)), rel=1e-12)


@pytest.mark.parametrize("least", by_default([0, 2], [0]))
def test_a_hundred_thousand_ranks_take_less_than_a_second(least):
    chance = random.Random(1)
    costs = [RankCost(chance.random(), 0.1 + chance.random(), 64) for _ in range(100_000)]
    began = time.process_time()
    shares = fastest_split(costs, 6_400_000, least)
    assert time.process_time() - began < 1
    assert sum(shares) == 6_400_000


def test_invalid_costs_and_totals_that_the_ranks_may_not_have_are_rejected():
    """Otherwise the search would not end or would return a meaningless split."""
    no_number = math.nan, math.inf, -math.inf, -1.0
    wrong = [(bad, 1.0) for bad in no_number] + [(1.0, bad) for bad in (*no_number, 0.0)]
    for bad in (*wrong, (1.0, 1.0, 0)):
        with pytest.raises(
            ValueError, match="cost must be finite, with beta_sec above 0 and a lim"
        ):
            fastest_split([RankCost(1.0, 1.0), RankCost(*bad)], 64)
    for least, most in ((3, None), (0, [1, 2])):
        with pytest.raises(ValueError, match="4 samples do not fit the ranks' limits"):
            fastest_split([RankCost(0, 1)] * 2, 4, least, most)
    for value in (1e-12, 1e9):  # extreme, but valid
        costs = [RankCost(value, value), RankCost(0.0, 1e-12, 1), RankCost(1e9, 1e9)]
        assert sum(fastest_split(costs, 10**9)) == 10**9
