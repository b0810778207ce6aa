"""Detecting stragglers, and why they are slow, from the step times that ranks report."""

import numpy as np
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


def test_equal_ranks_are_no_stragglers():
    watched, seen = watch(50, lambda _: (even(), [0.0] * 3))
    assert seen == []
    assert watched.found == []


def test_a_rank_that_slows_down_is_reported_and_so_is_its_recovery():
    def told(step):
        slow = 3.0 if 30 <= step < 60 else 1.0
        steps = even()
        steps[1] = (1, 32, 0.3 * slow, 0.01)
        for rank in (0, 2):
            steps[rank] = (1, 32, 0.3, 0.01 + 0.3 * (slow - 1))
        return steps, [0.0] * 3

    watched, seen = watch(100, told)
    assert [(rank, kind, begins) for _, rank, kind, begins in seen] == [
        (1, COMPUTE, True),
        (1, COMPUTE, False),
    ]
    (slow,) = watched.found
    assert abs(slow.since_step - 30) <= 2
    assert 60 <= slow.until_step <= 70
    assert 2.7 < slow.amount < 3.3
    assert "as long" in slow.text


def test_a_rank_that_was_always_slow_is_reported():
    def told(_):
        return [(1, 32, 0.3, 0.3), (1, 32, 0.3, 0.3), (1, 32, 0.6, 0)], [0.0] * 3

    watched, _ = watch(20, told)
    assert [(slow.rank, slow.kind) for slow in watched.found] == [(2, COMPUTE)]
    assert "wait for it" in watched.found[0].text


def test_a_higher_cost_per_sample_of_a_smaller_share_is_not_reported():
    cost = RankCost(0.2, 0.01)

    def told(step):
        samples = 64 if step < 30 else 16
        return [(1, samples, cost.seconds(samples), 0.01)] * 2, [0.0] * 2

    watched, _ = watch(80, told, ranks=2, costs=[cost, cost])
    assert watched.found == []


def test_slow_data_loading_is_distinguished_from_slow_computing():
    def told(_):
        steps = even()
        steps[2] = (1, 32, 0.45, 0.01)  # 0.15 s of these for its batch
        return steps, [0.0, 0.0, 0.15]

    watched, _ = watch(20, told)
    kinds = {(slow.rank, slow.kind) for slow in watched.found}
    assert (2, DATA) in kinds
    assert not any(kind == DATA and rank != 2 for rank, kind in kinds)


def test_communication_is_the_wait_of_the_last_rank_to_arrive():
    def told(_):
        steps = even(wait=0.4)
        steps[1] = (1, 32, 0.35, 0.35)
        return steps, [0.0] * 3

    watched, _ = watch(20, told)
    (slow,) = watched.found
    assert (slow.rank, slow.kind) == (1, COMMUNICATION)
    assert 0.45 < slow.amount < 0.55
