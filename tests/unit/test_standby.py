"""Who takes a lost rank's place."""

from types import SimpleNamespace

import pytest

from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.train.membership import Standby, plan_standby, replace_lost, spares_left


def make_rank(number, host="a", kind="cpu"):
    return RankInfo(number, number, host, kind, "cpu", "a CPU", 2**30, "2.8")


def standby(spares=(), excluded=()):
    return Standby(frozenset(spares), frozenset(excluded))


ALIKE = [make_rank(number) for number in range(5)]
GPU, MLU = "gpu", "mlu"
KINDS = [("a", GPU), ("a", MLU), ("b", GPU), ("b", MLU), ("b", GPU), ("a", GPU), ("b", MLU)]
UNLIKE = [make_rank(number, *place) for number, place in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("infos", "before", "lost", "after"),
    [
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
    ],
)
def test_a_lost_rank_is_replaced_by_the_most_similar_spare(infos, before, lost, after):
    alive = [info for info in infos if info.world_rank not in lost]
    gone = [info for info in infos if info.world_rank in lost]
    assert replace_lost(before, alive, gone) == after
    assert replace_lost(before, alive, gone[::-1]) == after


def test_at_least_one_rank_always_trains():
    for dead in range(1, 31):  # every set of ranks but all
        lost = [rank for rank in range(5) if dead >> rank & 1]
        alive = [info for info in ALIKE if info.world_rank not in lost]
        gone = [ALIKE[rank] for rank in lost]
        for spares, excluded in (([], []), ([4], []), ([3, 4], []), ([4], [3]), ([], [0, 1, 2])):
            after = replace_lost(standby(spares, excluded), alive, gone)
            assert after.active(alive)
            assert after.spares | after.excluded <= {info.world_rank for info in alive}


def test_the_last_ranks_are_spares_and_one_lost_before_the_start_takes_the_place_of_one():
    for infos, spares, excluded, expected, active in (
        (ALIKE, 0, [], standby(), [0, 1, 2, 3, 4]),
        (ALIKE, 2, [], standby([3, 4]), [0, 1, 2]),
        (ALIKE, 1, [2], standby([4], [2]), [0, 1, 3]),
        # Some are lost before others go on standby.
        ([ALIKE[rank] for rank in (1, 3, 4)], 1, [1], standby([4], [1]), [1]),
        (ALIKE[1:], 0, [0, 2], standby([], [2]), [0, 2, 3]),
        (ALIKE[2:3], 0, [2], standby(), [0]),
    ):
        assert plan_standby(infos, spares, excluded) == expected
        assert expected.active(infos) == active
    for started, alive, spares, left in (
        *((4, 4, 1, 1), (4, 3, 1, 0), (4, 2, 1, 0), (4, 3, 2, 1)),
        *((2, 1, 1, 0), (3, 3, 5, 2), (3, 3, 0, 0)),
    ):
        assert spares_left(SimpleNamespace(started=started, size=alive), spares) == left
