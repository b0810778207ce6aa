"""Who takes a lost rank's place."""

import pytest

from kaitian_mpi.elastic.roles import Roles, plan_recovery, spare_roles
from kaitian_mpi.mpi.topology import RankInfo


def make_rank(number, host="a", kind="cpu"):
    return RankInfo(number, number, host, kind, "cpu", "a CPU", 2**30, "2.8")


def roles(spares=(), left_out=()):
    return Roles(frozenset(spares), frozenset(left_out))


ALIKE = [make_rank(number) for number in range(5)]
UNLIKE = [
    make_rank(0, "a", "gpu"),
    make_rank(1, "a", "mlu"),
    make_rank(2, "b", "gpu"),
    make_rank(3, "b", "mlu"),
    make_rank(4, "b", "gpu"),
    make_rank(5, "a", "gpu"),
    make_rank(6, "b", "mlu"),
]


@pytest.mark.parametrize(
    ("infos", "before", "lost", "after"),
    [
        # Nobody stands by.
        (ALIKE, roles(), [0], roles()),
        (ALIKE, roles(), [0, 1, 2, 3], roles()),
        # The first of equal spares comes in.
        (ALIKE, roles([3, 4]), [0], roles([4])),
        (ALIKE, roles([3, 4]), [0, 2], roles()),
        (ALIKE, roles([4]), [0, 1], roles()),
        # A spare that dies is not replaced.
        (ALIKE, roles([3, 4]), [4], roles([3])),
        (ALIKE, roles([3, 4]), [3, 4], roles()),
        (ALIKE, roles([3, 4]), [1, 3], roles()),
        # Nor is one that was left out; where nobody else is, it comes back.
        (ALIKE, roles([4], [3]), [3], roles([4])),
        (ALIKE, roles([], [3]), [0], roles([], [3])),
        (ALIKE, roles([], [3, 4]), [0, 1, 2], roles()),
        (ALIKE, roles([], [3, 4]), [0, 1, 2, 3], roles()),
        (ALIKE, roles([4], [3]), [0], roles([], [3])),
        (ALIKE, roles([4], [3]), [0, 1, 2], roles([], [3])),
        # One of the same kind and host, else of the kind, else of the host, else the first.
        (UNLIKE, roles([4, 5, 6]), [0], roles([4, 6])),
        (UNLIKE, roles([4, 5, 6]), [2], roles([5, 6])),
        (UNLIKE, roles([4, 5, 6]), [1], roles([4, 5])),
        (UNLIKE, roles([4, 5]), [1], roles([4])),
        (UNLIKE, roles([4, 5]), [3], roles([5])),
        (UNLIKE, roles([4, 6]), [0], roles([6])),
        (UNLIKE, roles([2, 4]), [1], roles([4])),
        # Several at once.
        (UNLIKE, roles([4, 5, 6]), [0, 2], roles([6])),
        (UNLIKE, roles([4, 5, 6]), [0, 1, 2, 3], roles()),
    ],
)
def test_a_lost_rank_is_replaced_by_the_most_similar_spare(infos, before, lost, after):
    alive = [info for info in infos if info.world_rank not in lost]
    gone = [info for info in infos if info.world_rank in lost]
    assert plan_recovery(before, alive, gone) == after
    assert plan_recovery(before, alive, gone[::-1]) == after


def test_at_least_one_rank_always_trains():
    for dead in range(1, 31):  # every set of ranks but all
        lost = [rank for rank in range(5) if dead >> rank & 1]
        alive = [info for info in ALIKE if info.world_rank not in lost]
        gone = [ALIKE[rank] for rank in lost]
        for before in (roles(), roles([4]), roles([3, 4]), roles([4], [3]), roles([], [0, 1, 2])):
            after = plan_recovery(before, alive, gone)
            assert after.working(alive)
            assert after.spares | after.left_out <= {info.world_rank for info in alive}


def test_working_returns_positions_among_the_surviving_ranks():
    alive = [ALIKE[rank] for rank in (1, 3, 4)]
    assert roles([4]).working(alive) == [0, 1]
    assert roles([4], [1]).working(alive) == [1]
    assert roles().working(alive) == [0, 1, 2]


def test_the_last_ranks_are_spares():
    assert spare_roles(ALIKE, 0) == roles()
    assert spare_roles(ALIKE, 2) == roles([3, 4])
