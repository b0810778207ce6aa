"""Which ranks are excluded because a job is faster without them."""

from types import SimpleNamespace

import pytest

from kaitian_mpi.balance.communication import AllreduceCost
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.train.measure import exclusion
from kaitian_mpi.train.measure.exclusion import ranks_to_exclude

FAST = RankCost(0.0, 0.01)
MIB = 1 << 20


def make_world(kinds, hosts):
    infos = [SimpleNamespace(kind=kind, host=host) for kind, host in zip(kinds, hosts, strict=True)]
    return SimpleNamespace(size=len(infos), infos=infos)


@pytest.fixture
def leave_out(monkeypatch):
    """Decide with an allreduce that costs `seconds(ranks)`; also return the measured sets."""

    def decide(world, costs, seconds, batch=64, errors=None):
        measured = []

        def measure(request, world, ranks, buckets):
            measured.append(list(ranks))
            return AllreduceCost(seconds(ranks), 0.0)

        monkeypatch.setattr(exclusion, "measure_allreduce", measure)
        config = TrainConfig(global_batch_size=batch)
        found = ranks_to_exclude(config, world, costs, errors or [0.0] * world.size, [MIB])
        return found, measured

    return decide


def test_with_cheap_communication_no_rank_is_excluded(leave_out):
    world = make_world(["gpu", "gpu", "mlu", "mlu"], "aabb")
    excluded, measured = leave_out(world, [FAST] * 4, lambda ranks: 1e-3)
    assert excluded == {}
    assert measured == [[0, 1, 2, 3]]


def test_a_rank_with_a_best_share_of_zero_is_excluded_first(leave_out):
    world = make_world(["gpu"] * 3, "aaa")
    snail = RankCost(0.0, 5.0)
    excluded, measured = leave_out(world, [FAST, snail, FAST], lambda ranks: 0.0)
    assert list(excluded) == [1]
    assert (
        "a single sample takes it 5 s, but a whole step takes the other ranks 0.32 s" in excluded[1]
    )
    assert measured == [[0, 1, 2]]  # one kind and one host: nothing else to compare


@pytest.mark.parametrize(("communication", "excluded"), [(0.0, [1]), (1e-3, [1]), (4e-3, [])])
def test_a_rank_is_kept_where_the_step_is_mostly_communication(leave_out, communication, excluded):
    world = make_world(["cpu"] * 2, "aa")
    # A tiny model: a step costs 0.1 ms, 0.25 ms on the other core, whatever its samples.
    costs = [RankCost(0.75e-4, 4e-7), RankCost(2.5e-4, 4e-7)]
    found, measured = leave_out(world, costs, lambda ranks: communication)
    assert list(found) == excluded
    assert measured == [[0, 1]]


@pytest.mark.parametrize(("error", "excluded"), [(0.0, [1]), (0.2, [1]), (0.6, [])])
def test_a_rank_is_kept_if_its_measurement_is_too_uncertain(leave_out, error, excluded):
    costs = [RankCost(0.75e-4, 4e-7), RankCost(2.5e-4, 4e-7)]
    world = make_world(["cpu"] * 2, "aa")
    found, _ = leave_out(world, costs, lambda ranks: 0.0, errors=[0.01, error])
    assert list(found) == excluded


def test_a_kind_that_costs_more_communication_than_it_computes_is_excluded(leave_out):
    world = make_world(["gpu", "gpu", "mlu", "mlu"], "aaaa")
    costs = [FAST, FAST, RankCost(0.0, 0.04), RankCost(0.0, 0.04)]
    crossing = lambda ranks: 0.5 if set(ranks) & {2, 3} and set(ranks) & {0, 1} else 0.001  # noqa: E731
    excluded, _ = leave_out(world, costs, crossing)
    assert sorted(excluded) == [2, 3]
    assert "with kind mlu" in excluded[2]
    assert "including communication" in excluded[2]


def test_a_host_behind_a_slow_link_is_excluded_whatever_its_kind(leave_out):
    world = make_world(["cpu"] * 3, ["near", "near", "far"])
    excluded, _ = leave_out(world, [FAST] * 3, lambda ranks: 1.0 if 2 in ranks else 0.001)
    assert sorted(excluded) == [2]
    assert "with host far" in excluded[2]


def test_a_gain_below_five_percent_excludes_nothing(leave_out):
    world = make_world(["gpu", "mlu"], "aa")
    costs = [FAST, RankCost(0.0, 0.3)]
    excluded, _ = leave_out(world, costs, lambda ranks: 0.02 if len(ranks) == 2 else 0.0)
    assert excluded == {}
