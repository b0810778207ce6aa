"""Forecasts: hand-computed cases, properties, and missing measurements."""

import random

import pytest

from kaitian_mpi.balance.communication import (
    FREE,
    AllreduceCost,
    MeasuredAllreduce,
    ddp_buckets,
    exposed_seconds,
    guessed_kinds,
    scale_allreduce,
)
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.forecast import Cohort, forecast, forecast_subsets, scale_cohorts, subsets
from kaitian_mpi.errors import UserError

MIB = 2**20


def cohort(kind, alpha, beta, ranks=1, limit=None):
    return Cohort(kind, RankCost(alpha, beta, limit), ranks)


def measured(latency, per_byte, **ranks):
    return MeasuredAllreduce(ranks, AllreduceCost(latency, per_byte))


def test_forecasts_computed_by_hand_of_every_choice_of_kinds_and_of_many_only_some():
    for gradient_bytes, buckets in (
        *((0, []), (1000, [1000]), (MIB, [MIB]), (26 * MIB, [MIB, 25 * MIB])),
        (60 * MIB + 5, [MIB, 25 * MIB, 25 * MIB, 9 * MIB + 5]),
    ):
        assert ddp_buckets(gradient_bytes) == buckets
    for buckets, micro_batches, exposed_sec in (
        # Forward ends at 3 s; the halves are ready at 6 and 9 s and take 4 s each: 6..10, 10..14.
        ([5, 5], 1, 5.0),
        # The last of three micro-batches: forward ends at 7 s, ready at 8 and 9 s: 8..12, 12..16.
        ([5, 5], 3, 7.0),
        ([], 1, 0.0),
    ):
        result_sec = exposed_seconds(9.0, buckets, AllreduceCost(4.0, 0.0), micro_batches)
        assert result_sec == pytest.approx(exposed_sec)
    for cohorts, buckets, latency, batch_sizes, compute_sec, exposed_sec, efficiency in (
        # 2 s + 1 s a sample against 2 s a sample: 6 and 4 samples in 8 s.
        ([(2.0, 1.0), (0.0, 2.0)], [MIB], 2.0, [6, 4], 8, 2, 1 / (6 / 8 + 4 / 8)),
        # A rank without samples counts with its rate at one sample.
        ([(0.0, 1.0), (50.0, 1.0)], [], 0.0, [10, 0], 10, 0, 1 / (1 + 1 / 51)),
        # Each micro-batch pays its fixed cost and hides less: the last of two takes 6 s; half of
        # the gradients are ready 2 s before its end.
        ([(1.0, 1.0, 1, 5)], [MIB, MIB], 3.0, [10], 12, 4, 12 / 16),
    ):
        cohorts = [cohort("gpu", *arguments) for arguments in cohorts]
        result = forecast(cohorts, 10, buckets, AllreduceCost(latency, 0.0))
        assert (result.batch_sizes, result.compute_sec) == (batch_sizes, compute_sec)
        assert result.exposed_sec == pytest.approx(exposed_sec)
        assert result.samples_per_sec == pytest.approx(10 / (compute_sec + exposed_sec))
        assert result.efficiency == pytest.approx(efficiency)
    cohorts = [cohort("gpu", 0.0, 1.0), cohort("mlu", 0.0, 1.0), cohort("cpu", 0.0, 9.0)]
    slow = AllreduceCost(3.0, 0.0)
    entries = [
        *(MeasuredAllreduce({kind: 1}, FREE) for kind in ("gpu", "mlu", "cpu")),
        measured(0.0, 0.0, gpu=1, mlu=1),
        MeasuredAllreduce({"gpu": 1, "cpu": 1}, slow),
        MeasuredAllreduce({"mlu": 1, "cpu": 1}, slow),
        MeasuredAllreduce({"gpu": 1, "mlu": 1, "cpu": 1}, slow),
    ]
    job = forecast_subsets(cohorts, 19, [MIB], entries)
    assert (len(job.forecasts), list(job.world)) == (7, ["gpu", "mlu", "cpu"])
    # gpu and mlu take 10 s for 10 and 9 samples; with cpu 9 s for 9, 9 and 1, and 3 s more.
    assert job.whole.samples_per_sec == pytest.approx(19 / 12)
    assert job.forecasts["gpu", "mlu"].samples_per_sec == pytest.approx(1.9)
    assert job.best == ("gpu", "mlu")
    assert job.gain("cpu") == pytest.approx(10 / 12 - 1)
    # Without gpu mlu does 18 and cpu 1 in 18 s, and 3 s more.
    assert job.gain("gpu") == pytest.approx(21 / 12 - 1)
    kinds = [f"k{index}" for index in range(9)]
    entries = [MeasuredAllreduce(dict.fromkeys(kept, 1), FREE) for kept in subsets(tuple(kinds))]
    job = forecast_subsets([cohort(kind, 0.0, 1.0) for kind in kinds], 72, [MIB], entries)
    assert [len(subset) for subset in job.forecasts] == [1] * 9 + [8] * 9 + [9]
    assert all(job.gain(kind) == pytest.approx(0.125) for kind in kinds)
    cohorts = [cohort("gpu", 0.0, 1.0), cohort("cpu", 0.0, 99.0)]
    job = forecast_subsets(cohorts, 5, [], [measured(0.0, 0.0, gpu=1, cpu=1)])
    assert (job.whole.batch_sizes, job.best, job.gain("cpu")) == ([5, 0], ("gpu",), 0)
    assert forecast_subsets(cohorts[:1], 5, [], []).gain("gpu") is None


@pytest.mark.parametrize("seed", range(30))
def test_exposed_time_equals_a_simulated_queue_of_buckets(seed):
    chance = random.Random(seed)
    buckets = [chance.randint(1, 100) for _ in range(chance.randint(1, 20))]
    cost = AllreduceCost(chance.random(), chance.random() * 0.1)
    compute_sec = chance.random() * 50
    end = ready_bytes = 0.0
    for size in buckets:
        ready_bytes += size
        ready = compute_sec * (1 + 2 * ready_bytes / sum(buckets)) / 3
        end = max(end, ready) + cost.seconds(size)
    assert exposed_seconds(compute_sec, buckets, cost) == pytest.approx(end - compute_sec)


ENTRIES = [
    measured(2e-4, 2e-10, gpu=2),
    measured(4e-4, 3e-10, mlu=4),
    measured(9e-4, 8e-10, gpu=2, mlu=4),
]


def test_scaling_reuses_measured_costs_in_turn_and_names_what_was_not_measured():
    for world, latency_sec, sec_per_byte in (
        # The measured world.
        *((e.ranks_per_kind, e.cost.latency_sec, e.cost.sec_per_byte) for e in ENTRIES),
        # A group scales like a ring.
        ({"gpu": 8}, 2e-4 * 3, 2e-10 * (7 / 8) / (1 / 2)),
        # A single rank has no allreduce.
        ({"mlu": 1}, 0.0, 0.0),
        # The slowest group and the crossing add up: that had added 9e-4 - 4e-4 and 8e-10 - 3e-10.
        ({"gpu": 8, "mlu": 8}, 5e-4 + 2e-4 * 3, 5e-10 + max(2e-10 * 7 / 4, 3e-10 * 7 / 6)),
        # A kind measured with one rank is assumed to be like the slowest, here the six ranks.
        ({"cpu": 36}, 9e-4 * 2, 8e-10 * (35 / 36) / (5 / 6)),
    ):
        cost = scale_allreduce(ENTRIES, world)
        assert cost.latency_sec == pytest.approx(latency_sec)
        assert cost.sec_per_byte == pytest.approx(sec_per_byte)
        assert guessed_kinds(ENTRIES, {"cpu": 2, "gpu": 9, "mlu": 1}) == ["cpu"]
        # Kinds that were measured only among more cost what the fewest of those do.
        times = {"abcd": 3e-3, "abc": 2e-3, "bcd": 1e-3}
        entries = [measured(sec, 0.0, **dict.fromkeys(kinds, 1)) for kinds, sec in times.items()]
        assert scale_allreduce(entries, {"a": 1, "b": 1}).latency_sec == 2e-3
    for entries, world, what in (
        ([measured(0.0, 0.0, cpu=1)], {"cpu": 4}, "inside cpu"),
        (ENTRIES[:2], {"gpu": 2, "mlu": 2}, "between gpu, mlu"),
        (ENTRIES, {"gpu": 2, "cpu": 1}, "between gpu, cpu"),
    ):
        with pytest.raises(UserError, match=f"no allreduce {what} was measured; run kaitian-plan"):
            scale_allreduce(entries, world)
    ranks = [cohort("gpu", 0.0, 1.0), cohort("cpu", 0.0, 5.0), cohort("gpu", 0.0, 2.0)]
    scaled = scale_cohorts(ranks, {"gpu": 5, "cpu": 1})
    rows = [(entry.kind, entry.cost.beta_sec, entry.ranks) for entry in scaled]
    assert rows == [("gpu", 1.0, 3), ("gpu", 2.0, 2), ("cpu", 5.0, 1)]
    assert [c.ranks for c in scale_cohorts(ranks, {"gpu": 1})] == [1]
    with pytest.raises(UserError, match="kind 'npu' was not measured, only gpu, cpu"):
        scale_cohorts(ranks, {"npu": 2})
