"""A pipeline's schedule and its plan: which ranks compute which layers, when, and their memory."""

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import pytest
from choices import by_default

from kaitian_mpi.balance.pipeline import (
    Action,
    Hop,
    Stage,
    max_in_flight,
    schedule,
    simulate,
    windows,
)
from kaitian_mpi.balance.pipeline_cost import (
    BUCKET_BYTES,
    TEMPORARIES,
    TRANSIT,
    Layer,
    LayerFacts,
    PipelineJob,
    fits,
    predict,
)
from kaitian_mpi.balance.pipeline_plan import _chunks, _Program, plan_pipeline, replan

MB = 10**6


def stages_of(*ranks_and_seconds):
    """Return stages of one layer each, with ranks in order: by stage, each rank's seconds."""
    rank = itertools.count()
    return [
        Stage(number, number + 1, tuple(next(rank) for _ in seconds), tuple(seconds))
        for number, seconds in enumerate(ranks_and_seconds)
    ]


def job_of(ranks, layers=12, **options):
    """Return a job of equal layers: 40 MB of weights and state, 10 ms a sample on a fast rank."""
    facts = tuple(
        LayerFacts(kind, memory_mb * MB, (1e-4 * slow,) * layers, (1e-2 * slow,) * layers)
        for kind, memory_mb, slow in ranks
    )
    layer = Layer(10 * MB, 30 * MB, MB, MB / 10)
    return PipelineJob((layer,) * layers, facts, **{"global_batch": 64, **options})


def actions(text):
    """Return the forwards and backwards in a text such as `F0 B0`."""
    return [Action(word[0] == "F", int(word[1:])) for word in text.split()]


def test_a_rank_takes_one_forward_and_one_backward_in_turn():
    assert list(schedule(range(5), 3)) == actions("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4")
    assert max_in_flight(range(5), 3) == 3
    # The window counts the other replica's micro-batches as well.
    assert list(schedule([0, 2, 4], 3)) == actions("F0 F2 B0 F4 B2 B4")
    assert list(schedule([], 3)) == []


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
    stages = stages_of(*([stage_sec] for stage_sec in seconds))
    count = 16
    hops = [Hop(0.0, 0.0)] * (len(seconds) - 1)
    step_sec = simulate(stages, hops, count, 1)
    assert count * max(seconds) <= step_sec <= sum(seconds) + (count - 1) * max(seconds) + 1e-9


def test_no_micro_batch_waits_forever():
    dice = random.Random(1)
    for _ in range(300):
        shape = [
            [dice.choice([1.0, 2.0, 5.0]) for _ in range(dice.randint(1, 4))]
            for _ in range(dice.randint(1, 5))
        ]
        hops = [Hop(dice.random(), dice.random()) for _ in shape[1:]]
        count = dice.randint(1, 30)
        ahead = dice.randint(0, 2)
        simulate(stages_of(*shape), hops, count, ahead)  # asserts that all micro-batches are done


def test_more_micro_batches_ahead_hide_slow_links():
    stages = stages_of([1.0], [1.0])
    hops = [Hop(0.5, 0.2)]
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


def random_job(choose):
    """Return a job of unequal layers, links and ranks of up to three kinds; some have no plan."""

    def layer():
        sizes = [choose.choice([0, choose.randrange(1, 900)]) for _ in range(4)]
        kept, output, temporary = (choose.uniform(0, 300) for _ in range(3))
        return Layer(sizes[0], sizes[1], kept, output, sizes[2], sizes[3], 1, 0.0, temporary)

    layers = tuple(layer() for _ in range(choose.randrange(1, 10)))

    def rank(kind):
        seconds = [tuple(choose.uniform(1e-6, 1e-3) for _ in layers) for _ in range(2)]
        memory_bytes = choose.choice([1e9, 2e4, 5e3]) + choose.choice([0, BUCKET_BYTES])
        return LayerFacts(
            kind, memory_bytes, *seconds,
            steps_at_once=choose.random() < 0.2, node=choose.randrange(3),
        )  # fmt: skip

    kinds = [rank(kind) for kind in "abc"]
    ranks = sorted(choose.choices(kinds, k=choose.randrange(1, 7)), key=lambda facts: facts.kind)
    links = {
        f"{one} {other}": Hop(choose.uniform(0, 1e-4), choose.uniform(0, 1e-6))
        for one, other in itertools.combinations_with_replacement("abc", 2)
    }
    return PipelineJob(layers, tuple(ranks), 32, links=links)


def least_seconds(job, order, count, bound):
    """Return the least sum of the stages' seconds within a bound, by trying all their ends."""
    samples = job.global_batch / count
    outputs = [0.0, *(samples * layer.output_bytes for layer in job.layers)]
    end = len(job.layers)

    def sent(ranks, layer, targets):
        hops = [job.hop(job.ranks[ranks[0]].kind, target, 1) for target in targets]
        nodes = len({job.ranks[rank].node for rank in ranks})
        busy = outputs[layer] * max(hop.busy_sec for hop in hops) / nodes if layer < end else 0.0
        return busy, 2 * (busy + max(hop.latency_sec for hop in hops) * (busy > 0))

    def fits_memory(ranks, layers, begin, after):
        facts = [job.ranks[rank] for rank in ranks]
        budget = min(rank.memory_bytes - rank.base_bytes for rank in facts)
        budget -= BUCKET_BYTES * (len(ranks) > 1)
        owned = sum(layer.weight_bytes + layer.state_bytes for layer in layers)
        largest = max(layer.largest_bytes for layer in layers)
        trained = sum(layer.trained_bytes for layer in layers)
        at_once = any(rank.steps_at_once for rank in facts)
        kept = samples * sum(layer.kept_bytes for layer in layers)
        transit = TRANSIT * (outputs[begin] + outputs[begin + len(layers)])
        transit += samples * max(layer.temporary_bytes for layer in layers)
        number = min(-(-(len(ranks) + after) // len(ranks)), -(-count // len(ranks)))
        computes = owned + largest + transit + number * kept <= budget
        return computes and owned + (trained if at_once else TEMPORARIES * largest) <= budget

    @cache
    def within_group(place, chunks, begin):
        """Return the least sum from a layer on, and its ranks, with these chunks of a group."""
        if not chunks:
            return from_group(place + 1, begin)
        group = order[place]
        ranks = group[slice(*chunks[0])]
        kind = job.ranks[group[0]].kind
        later = {job.ranks[ranks[0]].kind for ranks in order[place + 1 :]}
        whole = [job.seconds(rank, 0, end, samples) for rank in group]
        speed = sum(whole[0] / whole[number] for number in range(*chunks[0]))
        best = math.inf, 0
        for target in range(begin + 1, end + 1):
            seconds = job.seconds(group[0], begin, target, samples)
            busy, hop = sent(ranks, target, later if len(chunks) == 1 and later else {kind})
            after_sec, after = within_group(place, chunks[1:], target)
            is_short = seconds <= bound * speed and busy <= bound
            if is_short and fits_memory(ranks, job.layers[begin:target], begin, after):
                gradients = sum(layer.trained_bytes for layer in job.layers[begin:target])
                share = 2 * (len(ranks) - 1) / len(ranks)
                cost = seconds * len(ranks) / speed + hop + after_sec
                cost += gradients * job.hop(kind, kind, share).busy_sec
                best = min(best, (cost, after + len(ranks)))
        return best

    @cache
    def from_group(place, begin):
        """Return the least sum from a layer on, and its ranks, by this group and later ones."""
        if place == len(order):
            return (0.0 if begin == end else math.inf), 0
        numbers = range(1, min(len(order[place]), end) + 1)
        divisions = (tuple(_chunks(len(order[place]), number)) for number in numbers)
        with_group = (within_group(place, chunks, begin) for chunks in divisions)
        return min(from_group(place + 1, begin), *with_group)

    return from_group(0, 0)[0]


@pytest.mark.parametrize("seed", by_default(range(40), range(6)))
def test_the_least_sum_within_a_bound_is_that_of_all_ends_of_all_stages(seed):
    job = random_job(random.Random(seed))
    groups = [list(group) for _, group in itertools.groupby(
        range(len(job.ranks)), lambda rank: job.ranks[rank])]  # fmt: skip
    for count in (1, 8):
        program = _Program(job, groups, count)
        for bound in (math.inf, 3 * program.least, 1.2 * program.least):
            solution = program.solve(bound)
            least = least_seconds(job, groups, count, bound)
            assert (solution is None) == math.isinf(least)
            if solution is not None:
                stages, seconds, longest = solution
                assert seconds == pytest.approx(least, rel=1e-9)
                assert longest <= bound * (1 + 1e-9)
                ends = [(stage.begin, stage.end) for stage in stages]
                assert [end for _, end in ends] == [
                    *(begin for begin, _ in ends[1:]),
                    len(job.layers),
                ]


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


@pytest.mark.thorough
def test_many_ranks_are_planned():
    ranks = [("gpu", 1000, 1)] * 500 + [("mlu", 2000, 3)] * 500
    plan = plan_pipeline(job_of(ranks, global_batch=10_000))
    used = [rank for stage in plan.stages for rank in stage.ranks]
    assert len(used) == len(set(used)) == 1000


def test_replicas_are_few_where_gradients_would_take_long():
    facts = tuple(LayerFacts("cpu", 4000 * MB, (1e-5,) * 8, (1e-5,) * 8) for _ in range(3))
    layer = Layer(12 * MB, 36 * MB, 1e4, 1e3, 0, 12 * MB)
    links = {"cpu cpu": Hop(1e-5, 1e-7)}
    plan = plan_pipeline(PipelineJob((layer,) * 8, facts, 32, links=links))
    assert [len(stage.ranks) for stage in plan.stages] == [1, 1, 1]
    assert plan.step_sec < 0.1


def test_a_plan_leaves_memory_for_an_optimizers_temporaries():
    layer = Layer(10 * MB, 30 * MB, 0.0, 0.0, 8 * MB, 10 * MB, 2)
    ranks = [("gpu", 450, 1), ("mlu", 450, 1)]
    job = replace(job_of(ranks, micro_batch=1), layers=(layer,) * 12)
    assert predict(job, [Stage(0, 12, (0,), (1.0,))], 1, 0).bytes_by_rank[0] == (480 + 16) * MB
    at_once = tuple(replace(facts, steps_at_once=True) for facts in job.ranks)
    plan = predict(replace(job, ranks=at_once), [Stage(0, 12, (0,), (1.0,))], 1, 0)
    assert plan.bytes_by_rank[0] == (480 + 120) * MB
    assert all(rank_bytes <= 450 * MB for rank_bytes in plan_pipeline(job).bytes_by_rank)


def test_a_stage_needs_the_temporary_memory_of_one_layer_at_a_time():
    job = job_of([("gpu", 900, 1)], micro_batch=4)
    stages = [Stage(0, 12, (0,), (1.0,))]
    layers = [replace(layer, temporary_bytes=n * MB) for n, layer in enumerate(job.layers)]
    job_with_temporaries = replace(job, layers=tuple(layers))
    plan = predict(job, stages, 4, 0)
    plan_with_temporaries = predict(job_with_temporaries, stages, 4, 0)
    assert plan_with_temporaries.bytes_by_rank[0] - plan.bytes_by_rank[0] == 4 * 11 * MB
    tight = [replace(job.ranks[0], memory_bytes=560 * MB)]
    for tight_job in (job, job_with_temporaries):
        plan = plan_pipeline(replace(tight_job, micro_batch=0, ranks=tight))
        assert 0.8 < plan.bytes_by_rank[0] / (560 * MB) <= 1


@pytest.mark.parametrize(
    ("slower", "steps", "moves"), [(1.0, 1000, False), (4.0, 1000, True), (4.0, 1, False)]
)
def test_stages_move_if_a_speed_has_changed_and_it_pays(slower, steps, moves):
    links = {("gpu", "mlu"): Hop(0.0, 2e-8)}  # the state takes longer on it than a step
    job = job_of([("gpu", 1000, 1), ("mlu", 1000, 1)], links=links)
    plan = plan_pipeline(job)
    count = math.ceil(64 / plan.micro_batch)
    work = [0.0, 0.0]
    for stage in plan.stages:
        for rank, seconds in zip(stage.ranks, stage.seconds, strict=True):
            work[rank] = stage.micro_batch_ranks(count).count(rank) * seconds
    work[1] *= slower
    proposal = replan(job, plan, work, steps)
    assert bool(proposal) == moves
    if proposal:
        factors, text = proposal
        assert factors == pytest.approx([1, 4])
        assert "new stages" in text
        changed = replace(job, ranks=(job.ranks[0], job.ranks[1].scaled(4)))
        assert sum(s.end - s.begin for s in plan_pipeline(changed).stages if 1 in s.ranks) < 6
