"""The optimal split, compared with every possible split and by its properties."""

import itertools
import math
import random
import time

import pytest

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.cost_table import CostTable
from kaitian_mpi.balance.fastest_split import RankCost, fastest_split
from kaitian_mpi.balance.planner import plan_fastest


def cost(alpha, beta, limit=None):
    return RankCost(CostModel(alpha, beta), limit)


def slowest(costs, shares):
    return max(one.seconds(share) for one, share in zip(costs, shares, strict=True))


def every_split(ranks, total):
    for cuts in itertools.combinations_with_replacement(range(total + 1), ranks - 1):
        ends = (0, *cuts, total)
        yield [after - before for before, after in itertools.pairwise(ends)]


def random_costs(chance, ranks):
    return [
        cost(
            chance.choice([0, 0.5, chance.random() * 5]),
            chance.choice([0.1, 1, chance.random() * 3]),
            chance.choice([None, 1, 2, 5]),
        )
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("min_batch", [1, 2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_no_split_is_faster_than_the_optimum(seed, min_batch):
    chance = random.Random(seed)
    costs = random_costs(chance, chance.randint(1, 4))
    total = chance.choice([0, chance.randint(min_batch, 14)])
    shares = fastest_split(costs, total, min_batch)
    assert sum(shares) == total
    assert all(share == 0 or share >= min_batch for share in shares)
    allowed = [
        split
        for split in every_split(len(costs), total)
        if all(share == 0 or share >= min_batch for share in split)
    ]
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
    assert table.can_process(total, seconds * (1 + 1e-9))
    assert not table.can_process(total, seconds * (1 - 1e-9))


@pytest.mark.parametrize("min_batch", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_no_split_over_all_ranks_is_faster_than_the_plan(seed, min_batch):
    chance = random.Random(seed)
    costs = random_costs(chance, chance.randint(1, 4))
    total = chance.randint(min_batch * len(costs), 14)
    plan = plan_fastest(costs, total, min_batch)
    assert sum(plan) == total
    assert min(plan) >= min_batch
    splits = every_split(len(costs), total)
    best = min(slowest(costs, split) for split in splits if min(split) >= min_batch)
    assert slowest(costs, plan) == pytest.approx(best, rel=1e-9)


def test_no_more_ranks_take_part_than_minimum_shares_fit():
    assert fastest_split([cost(0, 1)] * 4, 5, 2) == [3, 2, 0, 0]
    assert fastest_split([cost(0, 1), cost(0, 1.1), cost(0, 1)], 3, 2) in ([3, 0, 0], [0, 0, 3])
    with pytest.raises(ValueError, match="must be 0 or at least 2"):
        fastest_split([cost(0, 1)] * 2, 1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_faster_rank_never_gets_less(seed):
    chance = random.Random(seed)
    costs = random_costs(chance, 6)
    total = chance.randint(6, 300)
    before = fastest_split(costs, total)
    rank = chance.randrange(6)
    model = costs[rank].model
    limit = costs[rank].largest_micro_batch
    costs[rank] = cost(model.alpha_sec * 0.7, model.beta_sec * 0.7, limit)
    assert fastest_split(costs, total)[rank] >= before[rank]


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_within_one_sample_of_the_relaxed_one(seed):
    """Fractional samples: T such that sum((T - alpha_i) / beta_i) = G over the ranks in use."""
    chance = random.Random(seed)
    costs = [cost(chance.random(), 0.01 + chance.random()) for _ in range(8)]
    total = chance.randint(1, 500)
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        done = sum(max(0, middle - c.model.alpha_sec) / c.model.beta_sec for c in costs)
        low, high = (low, middle) if done >= total else (middle, high)
    one_sample = max(c.model.beta_sec for c in costs)
    assert slowest(costs, fastest_split(costs, total)) <= high + one_sample + 1e-9


def test_a_rank_that_would_slow_the_step_gets_no_samples():
    assert fastest_split([cost(0, 1), cost(50, 1)], 10) == [10, 0]
    assert fastest_split([cost(0, 1), cost(0, 100)], 10) == [10, 0]


def test_a_fast_rank_with_little_memory_uses_micro_batches():
    costs = [cost(0.01, 0.1, 4), cost(0.01, 0.4)]
    shares = fastest_split(costs, 50)
    assert shares == [40, 10]
    assert [one.micro_batches(share) for one, share in zip(costs, shares, strict=True)] == [10, 1]


def test_a_rank_with_zero_cost_is_an_error():
    with pytest.raises(ValueError, match="beta_sec must be finite and above 0, not 0"):
        fastest_split([cost(1, 1), cost(1, 0)], 10)


def test_equal_ranks_get_equal_shares():
    assert fastest_split([cost(1, 1)] * 4, 256) == [64] * 4
    assert sorted(fastest_split([cost(1, 1)] * 3, 10)) == [3, 3, 4]


@pytest.mark.parametrize("min_batch", [1, 2])
def test_a_hundred_thousand_ranks_take_less_than_a_second(min_batch):
    chance = random.Random(1)
    costs = [cost(chance.random(), 0.1 + chance.random(), 64) for _ in range(100_000)]
    began = time.process_time()
    shares = fastest_split(costs, 6_400_000, min_batch)
    assert time.process_time() - began < 1
    assert sum(shares) == 6_400_000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("where", ["alpha_sec", "beta_sec"])
def test_invalid_costs_are_rejected(bad, where):
    """Otherwise the search would not end or would return a meaningless split."""
    costs = [cost(1.0, 1.0), cost(*((bad, 1.0) if where == "alpha_sec" else (1.0, bad)))]
    with pytest.raises(ValueError, match=f"{where} must be finite and .*, not {bad}"):
        fastest_split(costs, 64)


def test_an_empty_micro_batch_is_rejected():
    with pytest.raises(ValueError, match="largest_micro_batch must be at least 1, not 0"):
        fastest_split([cost(1.0, 1.0, 0)], 64)
