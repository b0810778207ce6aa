"""`--layout auto` in a trainer: the layouts are compared by what a step takes besides computing."""

from dataclasses import replace

import pytest

from kaitian_mpi.balance.communication import AllreduceCost
from kaitian_mpi.balance.layouts import REPLICATE, SHARD
from kaitian_mpi.balance.pipeline_cost import LayerFacts
from kaitian_mpi.integrations.shard.layout_choice import Costs, step_seconds

SIZE = 8 << 20
RANK = LayerFacts("cpu", 0.0, (), (), update_sec_per_byte=1e-9)
HALF = AllreduceCost(0.0, 1e-9)
COSTS = Costs(AllreduceCost(0.0, 2e-9), HALF, HALF, [RANK, RANK])


def test_ranks_share_the_optimizers_work_in_shard():
    seconds = step_seconds(COSTS, [0.5, 0.5], 10, SIZE)
    assert seconds[REPLICATE] == pytest.approx(3e-9 * SIZE)
    assert seconds[SHARD] == pytest.approx(2.5e-9 * SIZE)


def test_a_rank_that_owns_nearly_all_saves_nothing_and_copies_cost():
    ranks = [replace(RANK, copy_sec_per_byte=1e-9)] * 2
    seconds = step_seconds(COSTS._replace(ranks=ranks), [1.0, 0.0], 10, SIZE)
    assert seconds[SHARD] - seconds[REPLICATE] == pytest.approx(1.5e-9 * SIZE)


def test_a_slow_gather_costs():
    seconds = step_seconds(
        COSTS._replace(gather_cost=AllreduceCost(0.0, 5e-9)), [0.5, 0.5], 10, SIZE
    )
    assert seconds[SHARD] == pytest.approx(6.5e-9 * SIZE)
