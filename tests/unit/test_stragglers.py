"""Detecting stragglers, and why they are slow, from the step times that ranks report."""

import numpy as np
import pytest
from rank_steps import rank_steps

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.stragglers import COMMUNICATION, COMPUTE, DATA, StragglerDetector


def watch(steps, told, ranks=3, costs=()):
    """Feed steps 1, 2, … and return the events as (step, rank, kind, begins)."""
    watch = StragglerDetector(ranks, costs)
    seen = []
    for step in range(1, steps + 1):
        rows, data = told(step)
        for change in watch.observe(step, rank_steps(*rows), np.array(data)):
            seen.append((step, change.rank, change.kind, change.until_step is None))
    return watch, seen


def even(work=0.3, wait=0.01):
    return [(1, 32, work, wait) for _ in range(3)]


def test_a_rank_that_slows_down_is_reported_and_so_is_its_recovery():
    watched, seen = watch(50, lambda _: (even(), [0.0] * 3))
    assert (seen, watched.found) == ([], [])

    def told(step):
        slow = 3.0 if 30 <= step < 60 else 1.0
        steps = even()
        steps[1] = (1, 32, 0.3 * slow, 0.01)
        for rank in (0, 2):
            steps[rank] = (1, 32, 0.3, 0.01 + 0.3 * (slow - 1))
        return steps, [0.0] * 3

    watched, seen = watch(100, told)
    assert [each[1:] for each in seen] == [(1, COMPUTE, True), (1, COMPUTE, False)]
    (slow,) = watched.found
    assert abs(slow.since_step - 30) <= 2
    assert 60 <= slow.until_step <= 70
    assert 2.7 < slow.amount < 3.3
    assert "as long" in slow.text


ROWS, WAITS = even(), (1, 32, 0.3, 0.4)


@pytest.mark.parametrize(
    ("rows", "data", "found"),
    [
        ([(1, 32, 0.3, 0.3), (1, 32, 0.3, 0.3), (1, 32, 0.6, 0)], 0.0, [(2, COMPUTE, 2.0)]),
        # 0.15 s of these for its batch.
        ([*ROWS[:2], (1, 32, 0.45, 0.01)], 0.15, [(2, COMPUTE, 1.5), (2, DATA, 0.33)]),
        # Communication is the wait of the last rank to arrive.
        ([WAITS, (1, 32, 0.35, 0.35), WAITS], 0.0, [(1, COMMUNICATION, 0.5)]),
    ],
)
def test_a_slow_rank_and_why(rows, data, found):
    watched, _ = watch(20, lambda _: (rows, [0.0, 0.0, data]))
    slow = [(each.rank, each.kind, pytest.approx(each.amount, abs=0.01)) for each in watched.found]
    assert slow == found
    if found[0][1] == COMPUTE:
        assert "wait for it" in watched.found[0].text


def test_a_higher_cost_per_sample_of_a_smaller_share_is_not_reported():
    cost = RankCost(0.2, 0.01)

    def told(step):
        samples = 64 if step < 30 else 16
        return [(1, samples, cost.seconds(samples), 0.01)] * 2, [0.0] * 2

    watched, _ = watch(80, told, ranks=2, costs=[cost, cost])
    assert watched.found == []
