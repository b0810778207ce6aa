"""The optimal split, compared with every possible split and by its properties."""

import itertools
import math
import random
import time

import numpy as np
import pytest

from kaitian_mpi.balance.cost_model import CostTable, RankCost
from kaitian_mpi.balance.shares import fastest_split, split_cohorts


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
@pytest.mark.parametrize("seed", range(50))
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


@pytest.mark.parametrize("seed", range(40))
def test_the_ranks_can_process_a_batch_in_the_time_of_its_fastest_split_and_not_sooner(seed):
    chance = random.Random(seed)
    costs = random_costs(chance, chance.randint(1, 4))
    total = chance.randint(1, 30)
    seconds = slowest(costs, fastest_split(costs, total))
    table = CostTable.of(costs)
    assert table.costs() == costs
    assert table.within(seconds * (1 + 1e-9), total).sum() >= total
    assert table.within(seconds * (1 - 1e-9), total).sum() < total


@pytest.mark.parametrize("seed", range(40))
def test_cohorts_take_as_long_as_their_ranks_listed_singly(seed):
    chance = random.Random(seed)
    costs, ranks = random_costs(chance, 4), [chance.randint(1, 7) for _ in range(4)]
    total = chance.randint(0, 200)
    samples, fewer = split_cohorts(CostTable.of(costs), np.array(ranks), total)
    assert (samples * ranks - fewer).sum() == total
    assert min(samples - (fewer > 0)) >= 0
    assert ((fewer >= 0) & (fewer <= ranks)).all()
    together = max(
        cost.seconds(share - (count == less))
        for cost, share, count, less in zip(costs, samples.tolist(), ranks, fewer, strict=True)
    )
    apart = [cost for cost, count in zip(costs, ranks, strict=True) for _ in range(count)]
    assert together == pytest.approx(slowest(apart, fastest_split(apart, total)), rel=1e-12)


@pytest.mark.parametrize(
    ("costs", "total", "shares"),
    [
        ([(0, 1), (50, 1)], 10, [10, 0]),  # a rank that would slow the step gets no samples
        ([(0, 1), (0, 100)], 10, [10, 0]),
        ([(0.01, 0.1, 4), (0.01, 0.4)], 50, [40, 10]),  # in micro-batches of 4
        ([(1, 1)] * 4, 256, [64] * 4),
        ([(1, 1)] * 3, 10, [4, 3, 3]),
    ],
)
def test_known_splits(costs, total, shares):
    assert fastest_split([RankCost(*cost) for cost in costs], total) == shares


@pytest.mark.parametrize("least", [0, 2])
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
        with pytest.raises(ValueError, match="cannot have 4 samples in all"):
            fastest_split([RankCost(0, 1)] * 2, 4, least, most)
    for value in (1e-12, 1e9):  # extreme, but valid
        costs = [RankCost(value, value), RankCost(0.0, 1e-12, 1), RankCost(1e9, 1e9)]
        assert sum(fastest_split(costs, 10**9)) == 10**9
