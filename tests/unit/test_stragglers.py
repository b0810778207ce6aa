"""Which rank is slow, and why, from what ranks tell of their steps."""

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.optimum import RankCost
from kaitian_mpi.balance.rebalancer import RankStep
from kaitian_mpi.balance.stragglers import COMMUNICATION, COMPUTE, DATA, SlownessWatch


def watch(steps, told, ranks=3, costs=()):
    """Feed steps 1, 2, … and return what begins or ends, as (step, rank, kind, begins)."""
    watch = SlownessWatch(ranks, costs)
    seen = []
    for step in range(1, steps + 1):
        rank_steps, data = told(step)
        for change in watch.observe(step, rank_steps, data):
            seen.append((step, change.rank, change.kind, change.until_step is None))
    return watch, seen


def even(work=0.3, wait=0.01):
    return [RankStep(1, 32, work, wait) for _ in range(3)]


def test_even_ranks_are_not_slow():
    watched, seen = watch(50, lambda _: (even(), [0.0] * 3))
    assert seen == []
    assert watched.found == []


def test_a_rank_that_computes_slower_than_before_is_named_with_its_step_and_its_recovery():
    def told(step):
        slow = 3.0 if 30 <= step < 60 else 1.0
        steps = even()
        steps[1] = RankStep(1, 32, 0.3 * slow, 0.01)
        for rank in (0, 2):
            steps[rank] = RankStep(1, 32, 0.3, 0.01 + 0.3 * (slow - 1))
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


def test_a_rank_that_others_wait_for_is_named_though_it_was_never_faster():
    def told(_):
        return [RankStep(1, 32, 0.3, 0.3), RankStep(1, 32, 0.3, 0.3), RankStep(1, 32, 0.6, 0)], [
            0.0
        ] * 3

    watched, _ = watch(20, told)
    assert [(slow.rank, slow.kind) for slow in watched.found] == [(2, COMPUTE)]
    assert "wait for it" in watched.found[0].text


def test_a_smaller_share_that_costs_more_a_sample_is_no_slowness():
    cost = RankCost(CostModel(0.2, 0.01))

    def told(step):
        samples = 64 if step < 30 else 16
        return [RankStep(1, samples, cost.seconds(samples), 0.01)] * 2, [0.0] * 2

    watched, _ = watch(80, told, ranks=2, costs=[cost, cost])
    assert watched.found == []


def test_data_loading_is_told_from_computing():
    def told(_):
        steps = even()
        steps[2] = RankStep(1, 32, 0.45, 0.01)  # 0.15 of them for its batch
        return steps, [0.0, 0.0, 0.15]

    watched, _ = watch(20, told)
    kinds = {(slow.rank, slow.kind) for slow in watched.found}
    assert (2, DATA) in kinds
    assert not any(kind == DATA and rank != 2 for rank, kind in kinds)


def test_communication_is_what_the_last_to_come_still_waits_for():
    def told(_):
        steps = even(wait=0.4)
        steps[1] = RankStep(1, 32, 0.35, 0.35)
        return steps, [0.0] * 3

    watched, _ = watch(20, told)
    (slow,) = watched.found
    assert (slow.rank, slow.kind) == (1, COMMUNICATION)
    assert 0.45 < slow.amount < 0.55
