"""A pipeline's schedule and its plan: who computes what, when, and in which memory."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from kaitian_mpi.balance.pipeline import (
    Action,
    Hop,
    Stage,
    max_in_flight,
    schedule,
    simulate,
    windows,
)
from kaitian_mpi.balance.pipeline_cost import Layer, LayerFacts, PipelineJob, fits, predict
from kaitian_mpi.balance.pipeline_plan import plan_pipeline, replan

MB = 10**6


def stages_of(*ranks_and_seconds):
    """Return stages of one layer each, with ranks numbered through."""
    numbers = itertools.count()
    return [
        Stage(place, place + 1, tuple(next(numbers) for _ in seconds), tuple(seconds))
        for place, seconds in enumerate(ranks_and_seconds)
    ]


def job_of(ranks, layers=12, **options):
    """Return a job of equal layers: 40 MB of weights and state, 10 ms a sample on a fast rank."""
    made = tuple(
        LayerFacts(kind, memory * MB, (1e-4 * slow,) * layers, (1e-2 * slow,) * layers)
        for kind, memory, slow in ranks
    )
    layer = Layer(10 * MB, 30 * MB, MB, MB / 10)
    return PipelineJob((layer,) * layers, made, **{"global_batch": 64, **options})


def test_a_rank_takes_one_forward_and_one_backward_in_turn():
    text = ["F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "B3", "B4"]
    expected = [Action(each[0] == "F", int(each[1])) for each in text]
    assert [*schedule(range(5), 3)] == expected
    assert max_in_flight(range(5), 3) == 3
    # Of every other one, those within the window of all.
    text = ["F0", "F2", "B0", "F4", "B2", "B4"]
    assert [*schedule([0, 2, 4], 3)] == [Action(each[0] == "F", int(each[1])) for each in text]
    assert [*schedule([], 3)] == []


def test_windows_end_with_the_last_stage():
    assert windows(stages_of([1], [1], [1]), 0) == [3, 2, 1]
    assert windows(stages_of([1], [1, 1], [1]), 0) == [4, 3, 1]
    assert windows(stages_of([1], [1], [1]), 1) == [5, 3, 1]


def test_replicas_take_micro_batches_by_their_speed():
    stage = Stage(0, 1, (4, 7), (1.0, 3.0))
    assert sorted(stage.micro_batch_ranks(8)) == [4] * 6 + [7] * 2
    assert stage.micro_batch_ranks(3) == stage.micro_batch_ranks(8)[:3]


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 1.0], [3.0, 1.0, 2.0]])
def test_without_transfers_a_step_takes_at_most_the_sum_and_the_longest_again(seconds):
    stages, count = stages_of(*([each] for each in seconds)), 16
    hops = [Hop(0.0, 0.0)] * (len(seconds) - 1)
    found = simulate(stages, hops, count, 1)
    assert count * max(seconds) <= found <= sum(seconds) + (count - 1) * max(seconds) + 1e-9


def test_no_micro_batch_waits_forever():
    dice = random.Random(1)
    for _ in range(300):
        shape = [
            [dice.choice([1.0, 2.0, 5.0]) for _ in range(dice.randint(1, 4))]
            for _ in range(dice.randint(1, 5))
        ]
        hops = [Hop(dice.random(), dice.random()) for _ in shape[1:]]
        count, ahead = dice.randint(1, 30), dice.randint(0, 2)
        simulate(stages_of(*shape), hops, count, ahead)  # asserts that all is done


def test_more_micro_batches_ahead_hide_slow_links():
    stages, hops = stages_of([1.0], [1.0]), [Hop(0.5, 0.2)]
    assert simulate(stages, hops, 16, 1) < 0.8 * simulate(stages, hops, 16, 0)


@pytest.mark.parametrize(
    "ranks",
    [
        [("gpu", 600, 1), ("mlu", 600, 3)],
        [("gpu", 300, 1), ("mlu", 600, 1)],
        [("gpu", 600, 1), ("mlu", 300, 2), ("npu", 300, 1)],
    ],
)
def test_the_plan_is_the_best_of_all_splits(ranks):
    job = job_of(ranks, layers=7, micro_batch=4)
    best = float("inf")
    for number in range(1, len(ranks) + 1):
        for chosen in itertools.permutations(range(len(ranks)), number):
            for ends in itertools.combinations(range(1, 7), number - 1):
                pairs = zip(chosen, itertools.pairwise([0, *ends, 7]), strict=True)
                stages = [Stage(*ends, (rank,), (1.0,)) for rank, ends in pairs]
                plan = predict(job, stages, 4, 1)
                best = min(best, plan.step_sec if fits(job, plan) else best)
    plan = plan_pipeline(job)
    assert fits(job, plan)
    assert plan.step_sec <= best * 1.001
    layers = [layer for stage in plan.stages for layer in range(stage.begin, stage.end)]
    assert layers == list(range(7))


def test_layers_go_where_there_is_memory_for_them():
    plan = plan_pipeline(job_of([("gpu", 400, 1), ("mlu", 150, 1), ("mlu", 150, 1)]))
    owned = {stage.ranks: stage.end - stage.begin for stage in plan.stages}
    assert sum(owned.values()) == 12
    assert owned[0,] >= 6
    assert plan_pipeline(job_of([("gpu", 200, 1), ("mlu", 150, 1)])) is None


def test_ranks_of_one_kind_are_replicas_of_a_stage():
    ranks = [("gpu", 1000, 1)] * 4 + [("mlu", 1000, 3)] * 4
    plan = plan_pipeline(job_of(ranks))
    assert [(stage.end - stage.begin, len(stage.ranks)) for stage in plan.stages] in (
        [(9, 4), (3, 4)],
        [(3, 4), (9, 4)],
    )


def test_many_ranks_are_planned():
    ranks = [("gpu", 1000, 1)] * 500 + [("mlu", 2000, 3)] * 500
    plan = plan_pipeline(job_of(ranks, global_batch=10_000))
    used = [rank for stage in plan.stages for rank in stage.ranks]
    assert len(used) == len(set(used)) == 1000


def test_replicas_are_few_where_gradients_would_take_long():
    facts = tuple(LayerFacts("cpu", 4000 * MB, (1e-5,) * 8, (1e-5,) * 8) for _ in range(3))
    layer, links = Layer(12 * MB, 36 * MB, 1e4, 1e3, 0, 12 * MB), {"cpu cpu": Hop(1e-5, 1e-7)}
    plan = plan_pipeline(PipelineJob((layer,) * 8, facts, 32, links=links))
    assert [len(stage.ranks) for stage in plan.stages] == [1, 1, 1]
    assert plan.step_sec < 0.1


def test_a_plan_has_room_for_what_an_optimizer_takes_while_it_steps():
    layer = Layer(10 * MB, 30 * MB, 0.0, 0.0, 8 * MB, 10 * MB, 2)
    ranks = [("gpu", 450, 1), ("mlu", 450, 1)]
    job = replace(job_of(ranks, micro_batch=1), layers=(layer,) * 12)
    assert predict(job, [Stage(0, 12, (0,), (1.0,))], 1, 0).bytes_by_rank[0] == (480 + 16) * MB
    at_once = tuple(replace(each, steps_at_once=True) for each in job.ranks)
    plan = predict(replace(job, ranks=at_once), [Stage(0, 12, (0,), (1.0,))], 1, 0)
    assert plan.bytes_by_rank[0] == (480 + 120) * MB
    assert all(own <= 450 * MB for own in plan_pipeline(job).bytes_by_rank)


def test_what_a_layer_has_at_once_counts_once_for_a_stage():
    job, stages = job_of([("gpu", 900, 1)], micro_batch=4), [Stage(0, 12, (0,), (1.0,))]
    layers = [replace(each, temporary_bytes=n * MB) for n, each in enumerate(job.layers)]
    with_some = replace(job, layers=tuple(layers))
    plans = [predict(each, stages, 4, 0) for each in (job, with_some)]
    assert plans[1].bytes_by_rank[0] - plans[0].bytes_by_rank[0] == 4 * 11 * MB
    for each in (replace(job, micro_batch=0), replace(with_some, micro_batch=0)):
        tight = replace(each, ranks=[replace(job.ranks[0], memory_bytes=560 * MB)])
        assert 0.8 < plan_pipeline(tight).bytes_by_rank[0] / (560 * MB) <= 1


@pytest.mark.parametrize(
    ("slower", "steps", "moves"), [(1.0, 1000, False), (4.0, 1000, True), (4.0, 1, False)]
)
def test_stages_move_if_a_speed_has_changed_and_it_pays(slower, steps, moves):
    links = {("gpu", "mlu"): Hop(0.0, 2e-8)}  # on which the state takes longer than a step
    job = job_of([("gpu", 1000, 1), ("mlu", 1000, 1)], links=links)
    plan = plan_pipeline(job)
    count = math.ceil(64 / plan.micro_batch)
    work = [0.0, 0.0]
    for stage in plan.stages:
        for rank, seconds in zip(stage.ranks, stage.seconds, strict=True):
            work[rank] = stage.micro_batch_ranks(count).count(rank) * seconds
    work[1] *= slower
    found = replan(job, plan, work, steps)
    assert bool(found) == moves
    if found:
        factors, text = found
        assert factors == pytest.approx([1, 4])
        assert "new stages" in text
        changed = replace(job, ranks=(job.ranks[0], job.ranks[1].scaled(4)))
        assert sum(s.end - s.begin for s in plan_pipeline(changed).stages if 1 in s.ranks) < 6
