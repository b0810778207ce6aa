"""The choice among the layouts of a job."""

import json
from dataclasses import asdict, replace

import pytest

from kaitian_mpi.balance.communication import AllreduceCost
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.experts import Expert, ExpertRank, ExpertsJob
from kaitian_mpi.balance.layouts import LayoutJob, choose, predict_layouts
from kaitian_mpi.balance.memory import layout_memory
from kaitian_mpi.balance.ownership import Need
from kaitian_mpi.balance.pipeline import Hop
from kaitian_mpi.balance.pipeline_cost import Layer, LayerFacts, PipelineJob
from kaitian_mpi.balance.records import rebuild

MB = 10**6


def a_job(memory, parameters=100 * MB, link=0.0, batch=32, layers=8, kept=MB):
    """Return a job, with Adam, of ranks that need 1 ms for a sample; `link` is in seconds/byte."""
    facts = tuple(
        LayerFacts("gpu", size, (0.0,) * layers, (1e-3 / layers,) * layers) for size in memory
    )
    size = parameters // layers
    bucket = max(1, min(size, 8 * MB))
    cost = AllreduceCost(0.0, link)
    return LayoutJob(
        chain=PipelineJob(
            (Layer(size, 3 * size, kept / layers, 1000.0, size, size, 1),) * layers,
            facts,
            batch,
            links={"gpu gpu": Hop(0, link)},
        ),
        whole=Layer(parameters, 3 * parameters, kept, 0.0, size, parameters, layers),
        needs=(
            Need(3 * parameters, bucket, 4 * size),
            Need(4 * parameters, bucket, 4 * size, freed=parameters),
        ),
        allreduce_cost=cost,
        scatter_cost=cost,
        gather_cost=cost,
    )


def with_ranks(job, **changed):
    """Return a job whose ranks have other facts."""
    ranks = tuple(replace(rank, **changed) for rank in job.chain.ranks)
    return replace(job, chain=replace(job.chain, ranks=ranks))


def possible(job):
    return [prediction.layout for prediction in predict_layouts(job) if prediction.step_sec]


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ([600 * MB] * 3, ["replicate", "shard", "pipeline"]),
        ([600 * MB, 350 * MB, 350 * MB], ["shard", "pipeline"]),  # replicas take 401 MB each
        ([600 * MB, 30 * MB, 30 * MB], ["pipeline"]),  # no memory for shard's buffers
        ([100 * MB] * 3, []),
    ],
)
def test_what_fits(memory, expected):
    assert possible(a_job(memory)) == expected


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (520 * MB, ["replicate", "shard", "pipeline"]),  # replicas take 400 MB and 100 MB
        (490 * MB, ["shard", "pipeline"]),
        (280 * MB, ["pipeline"]),  # else shard as well: half of 400 MB, and buffers of 50 MB
    ],
)
def test_an_optimizer_that_steps_all_at_once_takes_more_memory(memory, expected):
    job = a_job([memory] * 2)
    assert possible(with_ranks(job, steps_at_once=True)) == expected
    _, shard, _ = predict_layouts(with_ranks(a_job([520 * MB] * 2), steps_at_once=True))
    # Half of the state and of what the optimizer allocates; all parameters, and buffers.
    assert shard.bytes_by_rank == ((150 + 50 + 100 + 50) * MB,) * 2


def test_autocasts_copies_of_weights_take_memory_unless_parameters_are_sharded():
    job = a_job([600 * MB] * 2)
    cast_job = replace(job, whole=replace(job.whole, cast_bytes=50 * MB))
    for prediction, with_casts in zip(predict_layouts(job), predict_layouts(cast_job), strict=True):
        if prediction.layout in ("replicate", "shard"):
            assert with_casts.bytes_by_rank[0] - prediction.bytes_by_rank[0] == 50 * MB
    # The copy of a sharded parameter is not kept.
    sharded = predict_layouts(replace(job, needs=job.needs[1:]))[1]
    cast_sharded = predict_layouts(replace(cast_job, needs=cast_job.needs[1:]))[1]
    assert cast_sharded == sharded


def test_parameters_are_sharded_if_they_do_not_fit_whole():
    whole = predict_layouts(a_job([300 * MB] * 3))[1]
    sharded = predict_layouts(a_job([250 * MB] * 3))[1]
    assert whole.step_sec
    assert whole.why == ""
    assert sharded.why == "parameters sharded, too"


def test_each_layout_is_the_fastest_somewhere():
    assert choose(predict_layouts(a_job([600 * MB] * 3))).layout == "replicate"
    assert choose(predict_layouts(a_job([600 * MB] * 3, link=1e-7))).layout == "pipeline"
    assert choose(predict_layouts(a_job([600 * MB, 350 * MB, 350 * MB]))).layout == "shard"
    assert choose(predict_layouts(a_job([100 * MB] * 3))) is None


def test_free_links_leave_the_time_of_the_slowest_rank():
    replicate, shard, pipeline = predict_layouts(a_job([600 * MB] * 4))
    assert replicate.step_sec == shard.step_sec == pytest.approx(8e-3)
    assert 8e-3 <= pipeline.step_sec < 13e-3  # several stages have to be filled and emptied


def test_the_optimizers_time_is_shared_in_shard_and_comes_after_the_sum():
    job = with_ranks(a_job([600 * MB] * 4), update_sec_per_byte=1e-10)
    replicate, shard, _ = predict_layouts(job)
    assert replicate.step_sec == pytest.approx(18e-3)
    assert shard.step_sec == pytest.approx(8e-3 + 10e-3 / 4)
    # The rank that computes the longest is not the one that steps the longest.
    first, *others = job.chain.ranks
    first = replace(first, memory_bytes=900 * MB, sample_sec=(4e-3,) * 8)
    shard = predict_layouts(replace(job, chain=replace(job.chain, ranks=(first, *others))))[1]
    assert shard.step_sec > 11e-3 + 10e-3 / 4
    mirrored = predict_layouts(replace(job, has_mirrors=True))[1]
    assert mirrored.step_sec == pytest.approx(8e-3 + 2 * 10e-3 / 4)


def test_in_shard_ranks_wait_for_each_other_after_each_micro_batch():
    job = a_job([600 * MB] * 2, batch=16)
    fast, slow = job.chain.ranks
    ranks = fast, replace(slow, sample_sec=(5e-4,) * 8)  # four times as long
    job = replace(job, chain=replace(job.chain, ranks=ranks, micro_batch=4))
    replicate, shard, _ = predict_layouts(job)
    assert replicate.step_sec == pytest.approx(13e-3)
    assert shard.step_sec == pytest.approx(12e-3 + 3 * 13e-3 / 4)


def test_many_parameters_take_time_of_their_own():
    job = a_job([600 * MB] * 4)
    slower = with_ranks(job, update_sec=1e-4, call_sec=1e-6)
    pairs = zip(predict_layouts(job), predict_layouts(slower), strict=True)
    replicate_sec, shard_sec, pipeline_sec = (slow.step_sec - fast.step_sec for fast, slow in pairs)
    assert replicate_sec > 8 * 1e-4
    assert shard_sec > 8 * 1e-4 / 4
    assert pipeline_sec > 8 * 1e-4 / 4


def test_what_is_ruled_out_is_not_chosen():
    job = replace(a_job([600 * MB, 350 * MB, 350 * MB]), refused={"shard": "a function clips"})
    predictions = predict_layouts(job)
    assert predictions[1].why == "a function clips"
    assert choose(predictions).layout == "pipeline"


def test_what_does_not_fit_says_what_is_missing():
    replicate, shard, pipeline = predict_layouts(a_job([100 * MB, 90 * MB]))
    assert replicate.why == "needs 401 MB on rank 1, which has 90 MB"
    assert "in total; the ranks have 190 MB" in shard.why
    assert "fits" in pipeline.why
    job = replace(a_job([600 * MB] * 3, batch=2), refused={"pipeline": "no layers"})
    replicate, shard, pipeline = predict_layouts(job)
    assert replicate.why == shard.why == "a global batch of 2 is too small for 3 ranks"
    assert pipeline.why == "no layers"


def test_a_job_is_the_same_from_a_file_and_grows_with_its_world():
    job = a_job([600 * MB, 300 * MB], link=1e-9)
    job = replace(job, refused={"shard": "a function clips"})
    read = rebuild(LayoutJob, json.loads(json.dumps(asdict(job))))
    assert read == job
    large = read.in_world({"gpu": 5}, 80, AllreduceCost(0.0, 2e-9))
    assert [rank.memory_bytes // MB for rank in large.chain.ranks] == [600, 300, 600, 300, 600]
    assert large.scatter_cost.sec_per_byte == pytest.approx(2e-9)
    assert large.chain.global_batch == 80


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_bytes", float("nan")), ("memory_bytes", -1), ("call_sec", 1e300), ("sample_sec", [])],
)
def test_a_file_with_impossible_numbers_is_refused(name, value):
    content = asdict(a_job([600 * MB]))
    content["chain"]["ranks"][0][name] = value
    with pytest.raises(ValueError, match="out of range"):
        rebuild(LayoutJob, content).check()


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (a_job([600 * MB]), ["replicate", "shard", "pipeline"]),
        (a_job([600 * MB, 0.0, 600 * MB]), ["pipeline"]),
        (a_job([0.0] * 2), []),
        (a_job([150 * MB] * 3, layers=1), []),
        (a_job([600 * MB] * 3, batch=1), ["pipeline"]),
        (a_job([60 * MB] * 2, parameters=0), ["replicate", "shard", "pipeline"]),
        pytest.param(
            a_job([600 * MB] * 20, batch=20, layers=180),
            ["replicate", "shard", "pipeline"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_odd_jobs_are_predicted(job, expected):
    assert possible(job) == expected


def with_experts(job, free=None):
    """Return a job of which three quarters of the parameters and of the time are 8 experts'."""
    size = job.whole.trained_bytes * 3 // 4 // 8
    ranks = tuple(
        ExpertRank(
            rank.kind,
            0,
            RankCost(0.0, sum(rank.sample_sec) / 4),
            (0.0,) * 8,
            (sum(rank.sample_sec) * 3 / 4 / 8,) * 8,
            (0.0,) * 8,
            max(0.0, rank.memory_bytes - job.whole.trained_bytes) if free is None else free,
            base_bytes=job.whole.trained_bytes,
        )
        for rank in job.chain.ranks
    )
    experts = (Expert(0, 4 * size, 0.0, 1000.0, size, size),) * 8
    batch, links = job.chain.global_batch, job.chain.links
    return replace(job, experts=ExpertsJob(experts, ranks, (1.0,) * 8, batch, links=links))


def test_experts_are_predicted_of_a_model_that_has_some():
    job = with_experts(a_job([600 * MB] * 2))
    replicate, *_, experts = predict_layouts(job)
    assert experts.layout == "experts"
    assert experts.step_sec == pytest.approx(replicate.step_sec)  # all links are free
    assert experts.why == "4 to 4 experts on a rank"
    assert max(experts.bytes_by_rank) < min(replicate.bytes_by_rank)
    assert choose(predict_layouts(job)).layout == "replicate"
    slow = with_experts(a_job([600 * MB] * 2, link=1e-8))  # replicas sum four times as much
    slow = replace(slow, refused={"pipeline": "no layers"})
    assert choose(predict_layouts(slow)).layout == "experts"
    small = with_experts(a_job([300 * MB] * 2))
    assert possible(small)[-1] == "experts"
    none = predict_layouts(with_experts(a_job([300 * MB] * 2), free=0.0))[-1]
    assert none.why == "no division of the experts fits the ranks' memory"
    refused = replace(a_job([600 * MB] * 2), refused={"experts": "they share a parameter"})
    assert predict_layouts(refused)[-1].why == "they share a parameter"


def test_a_job_with_experts_is_the_same_from_a_file_and_grows_with_its_world():
    job = with_experts(a_job([600 * MB, 300 * MB], link=1e-9))
    read = rebuild(LayoutJob, json.loads(json.dumps(asdict(job))))
    assert read == job
    read.check()
    large = read.in_world({"gpu": 5}, 80, AllreduceCost(0.0, 2e-9))
    assert len(large.experts.ranks) == 5
    assert large.experts.global_batch == 80
    assert predict_layouts(large)[-1].step_sec
    huge = read.in_world({"gpu": 257}, 2056, AllreduceCost(0.0, 2e-9))
    assert predict_layouts(huge)[-1].why == "not predicted for more than 256 ranks"


def test_the_memory_of_experts_adds_up():
    job = with_experts(a_job([600 * MB] * 2))
    memory = layout_memory(job, "experts")
    assert memory.fits
    predicted = predict_layouts(job)[-1]
    totals = [rank.total for rank in memory.ranks]
    assert totals == pytest.approx(predicted.bytes_by_rank, abs=2)
    assert {rank.parameters for rank in memory.ranks} == {100 * MB * (1 / 4 + 3 / 8)}
    assert layout_memory(with_experts(a_job([300 * MB]), free=0.0), "experts").ranks == ()
