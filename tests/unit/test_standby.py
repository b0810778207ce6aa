"""Which ranks train: who takes a lost one's place, and who is excluded for being too slow."""

from types import SimpleNamespace

import pytest

from kaitian_mpi.balance.communication import AllreduceCost
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.train.measure import exclusion
from kaitian_mpi.train.measure.exclusion import ranks_to_exclude
from kaitian_mpi.train.membership import Standby, plan_standby, replace_lost


def make_rank(number, host="a", kind="cpu"):
    return RankInfo(number, number, host, kind, "cpu", "a CPU", 2**30, "2.8")


def standby(spares=(), excluded=()):
    return Standby(frozenset(spares), frozenset(excluded))


ALIKE = [make_rank(number) for number in range(5)]
GPU, MLU = "gpu", "mlu"
KINDS = [("a", GPU), ("a", MLU), ("b", GPU), ("b", MLU), ("b", GPU), ("a", GPU), ("b", MLU)]
UNLIKE = [make_rank(number, *place) for number, place in enumerate(KINDS)]


def test_the_last_ranks_are_spares_and_the_most_similar_one_replaces_a_lost_rank():
    for infos, before, lost, after in (
        # No rank is on standby.
        (ALIKE, standby(), [0], standby()),
        (ALIKE, standby(), [0, 1, 2, 3], standby()),
        # The first of equal spares comes in.
        (ALIKE, standby([3, 4]), [0], standby([4])),
        (ALIKE, standby([3, 4]), [0, 2], standby()),
        (ALIKE, standby([4]), [0, 1], standby()),
        # A spare that dies is not replaced.
        (ALIKE, standby([3, 4]), [4], standby([3])),
        (ALIKE, standby([3, 4]), [1, 3], standby()),
        # Nor is one that was excluded; where no other is left, it becomes active.
        (ALIKE, standby([4], [3]), [3], standby([4])),
        (ALIKE, standby([], [3]), [0], standby([], [3])),
        (ALIKE, standby([], [3, 4]), [0, 1, 2, 3], standby()),
        (ALIKE, standby([4], [3]), [0, 1, 2], standby([], [3])),
        # One of the same kind and host, else of the kind, else of the host, else the first.
        (UNLIKE, standby([4, 5, 6]), [0], standby([4, 6])),
        (UNLIKE, standby([4, 5, 6]), [2], standby([5, 6])),
        (UNLIKE, standby([4, 5, 6]), [1], standby([4, 5])),
        (UNLIKE, standby([4, 5]), [3], standby([5])),
        (UNLIKE, standby([4, 6]), [0], standby([6])),
        (UNLIKE, standby([2, 4]), [1], standby([4])),
        # Several at once.
        (UNLIKE, standby([4, 5, 6]), [0, 1, 2, 3], standby()),
    ):
        alive = [info for info in infos if info.world_rank not in lost]
        gone = [info for info in infos if info.world_rank in lost]
        assert replace_lost(before, alive, gone) == after
        assert replace_lost(before, alive, gone[::-1]) == after
    for dead in range(1, 31):  # every set of ranks but all
        lost = [rank for rank in range(5) if dead >> rank & 1]
        alive = [info for info in ALIKE if info.world_rank not in lost]
        gone = [ALIKE[rank] for rank in lost]
        for spares, excluded in (([], []), ([4], []), ([3, 4], []), ([4], [3]), ([], [0, 1, 2])):
            after = replace_lost(standby(spares, excluded), alive, gone)
            assert after.active(alive)
            assert after.spares | after.excluded <= {info.world_rank for info in alive}
    for infos, spares, excluded, expected, active in (
        (ALIKE, 0, [], standby(), [0, 1, 2, 3, 4]),
        (ALIKE, 2, [], standby([3, 4]), [0, 1, 2]),
        (ALIKE, 1, [2], standby([4], [2]), [0, 1, 3]),
        # Some are lost before others go on standby.
        ([ALIKE[rank] for rank in (1, 3, 4)], 1, [1], standby([4], [1]), [1]),
        (ALIKE[1:], 0, [0, 2], standby([], [2]), [0, 2, 3]),
        (ALIKE[2:3], 0, [2], standby(), [0]),
    ):
        world = SimpleNamespace(infos=infos, size=len(infos), started=len(infos))
        assert plan_standby(world, spares, excluded) == expected
        assert expected.active(infos) == active
    for started, alive, spares, left in (
        *((4, 4, 1, 1), (4, 3, 1, 0), (4, 2, 1, 0), (4, 3, 2, 1)),
        *((2, 1, 1, 0), (3, 3, 5, 2), (3, 3, 0, 0)),
    ):
        world = SimpleNamespace(infos=ALIKE[:alive], size=alive, started=started)
        assert len(plan_standby(world, spares, ()).spares) == left


FAST, SLOW, SNAIL = (RankCost(0.0, beta_sec) for beta_sec in (0.01, 0.04, 5.0))
TINY = [RankCost(0.75e-4, 4e-7), RankCost(2.5e-4, 4e-7)]
"""Of a tiny model: a step costs 0.1 ms, 0.25 ms on the other core, whatever its samples."""
MIXED, CPUS = ["gpu", "gpu", "mlu", "mlu"], ["cpu"] * 2
LAST = "a single sample takes it 5 s, but a whole step takes the other ranks 0.32 s"


def between_kinds(ranks):
    return 0.5 if set(ranks) & {2, 3} and set(ranks) & {0, 1} else 0.001


def to_rank_2(ranks):
    return 1.0 if 2 in ranks else 0.001


def of_two(ranks):
    return 0.02 * (len(ranks) == 2)


@pytest.mark.parametrize(
    ("kinds", "hosts", "costs", "communication", "error", "excluded", "why", "measured"),
    [
        # Communication is cheap.
        (MIXED, "aabb", [FAST] * 4, 1e-3, 0, [], "", [[0, 1, 2, 3]]),
        # A rank with a best share of zero is excluded first; there is nothing else to compare.
        (["gpu"] * 3, "aaa", [FAST, SNAIL, FAST], 0.0, 0, [1], LAST, [[0, 1, 2]]),
        # A rank is kept where the step is mostly communication.
        (CPUS, "aa", TINY, 0.0, 0, [1], "a single sample", [[0, 1]]),
        (CPUS, "aa", TINY, 1e-3, 0, [1], "a single sample", [[0, 1]]),
        (CPUS, "aa", TINY, 4e-3, 0, [], "", [[0, 1]]),
        # A rank is kept if its measurement is too uncertain.
        (CPUS, "aa", TINY, 0.0, 0.2, [1], "a single sample", [[0, 1]]),
        (CPUS, "aa", TINY, 0.0, 0.6, [], "", [[0, 1]]),
        # A kind that costs more communication than it computes.
        (MIXED, "aaaa", [FAST, FAST, SLOW, SLOW], between_kinds, 0, [2, 3], "with kind mlu", None),
        # A host behind a slow link, whatever its kind.
        (["cpu"] * 3, "aab", [FAST] * 3, to_rank_2, 0, [2], "with host b", None),
        # A gain below 5% excludes nothing.
        (["gpu", "mlu"], "aa", [FAST, RankCost(0.0, 0.3)], of_two, 0, [], "", None),
    ],
)
def test_which_ranks_are_excluded_and_why(
    monkeypatch, kinds, hosts, costs, communication, error, excluded, why, measured
):
    infos = [SimpleNamespace(kind=kind, host=host) for kind, host in zip(kinds, hosts, strict=True)]
    world, asked = SimpleNamespace(size=len(infos), infos=infos), []

    def measure(request, world, ranks, buckets):
        asked.append(list(ranks))
        return AllreduceCost(communication(ranks) if callable(communication) else communication, 0)

    monkeypatch.setattr(exclusion, "measure_allreduce", measure)
    errors = [0.0, error, *[0.0] * (len(infos) - 2)]
    config = TrainConfig(global_batch_size=64)
    found = ranks_to_exclude(config, world, costs, errors, [1 << 20])
    assert sorted(found) == excluded
    assert all(why in reason for reason in found.values())
    assert asked == measured or measured is None
