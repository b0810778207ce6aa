"""Ranks that die or diverge in real jobs, and jobs that resume from checkpoints."""

import itertools
import json
import os
import re
import time
from importlib.util import find_spec

import jobs
import pytest
import torch
from trace_rules import check_trace, spans_of

from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler

SAMPLES = 1438  # of the digits, for training
BATCH = 256
STEPS_PER_EPOCH = 6

EXACT = "kaitian-train --model planted:Exact --dataset planted:recorded_digits --epochs 5".split()


def order_of_samples(epoch):
    sampler = LoadAdaptiveSampler(range(SAMPLES), [BATCH], 0, seed=0)
    sampler.set_epoch(epoch)
    return sampler.indices(0, SAMPLES)


# Loss of rank 0 of three


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same training on one rank, without mpirun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert "1 rank, 1 group" in jobs.run_alone(*EXACT, *jobs.EVEN, cwd=folder).out
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Three ranks, of which rank 0 is killed in training."""
    folder = tmp_path_factory.mktemp("killed")
    often = "--checkpoint-every 5 --keep-checkpoints 99 --check-every 5 --timeline".split()
    export = ["--export", "model.safetensors"] if find_spec("safetensors") else []
    with jobs.Job(3, *EXACT, *jobs.EVEN, *often, *export, cwd=folder, fresh=False) as job:
        job.wait_for(r"step 8/")
        job.kill(0)
        ended = job.finish()
    (failure,) = jobs.summary_of(folder)["failures"]
    return folder, ended, failure


def test_job_survives_the_loss_of_rank_0(killed):
    folder, ended, failure = killed
    assert "fault tolerance: on" in ended.text
    summary = jobs.summary_of(folder)
    assert summary["finished"] is True
    assert summary["ranks"] == [1, 2]
    assert summary["steps"] == 5 * STEPS_PER_EPOCH
    assert summary["global_batch_size"] == BATCH
    (lost,) = failure["ranks"]
    assert (lost["rank"], lost["host"]) == (0, os.uname().nodename)
    assert 8 < failure["step"] < 5 * STEPS_PER_EPOCH
    assert 0 < failure["seconds_to_recover"] < jobs.SOON_SEC
    said = f"rank 0 ({lost['host']}, cpu) was lost at step {failure['step'] - 1}"
    assert f"{said}; 2 ranks continue" in ended.text
    assert f"\nnote: {said}" in ended.text
    assert "Traceback" not in ended.text


def test_output_and_files_continue_after_the_loss(killed):
    folder, ended, failure = killed
    every = list(range(1, 5 * STEPS_PER_EPOCH + 1))
    # Rank 0 may have died after a step was done and before it printed its line.
    without = [step for step in every if step != failure["step"] - 1]
    assert jobs.steps_shown(ended) in (every, without)
    metrics = jobs.read_readings(folder / "run")
    assert [line["step"] for line in metrics] in (every, without)
    assert {len(line["wait_time_sec"]) for line in metrics} == {3, 2}
    plans = jobs.read_lines(folder / "run" / "plan.jsonl")
    assert [plan["step"] for plan in plans] == [0, failure["step"] - 1]
    assert [sum(plan["batch_sizes"]) for plan in plans] == [BATCH, BATCH]
    assert [len(plan["batch_sizes"]) for plan in plans] == [3, 2]
    assert not list(folder.rglob("*.partial"))


def test_events_tell_of_the_loss_and_what_followed(killed):
    folder, _, failure = killed
    events = jobs.read_lines(folder / "run" / "events.jsonl")
    # Rank 0 may have died before it told of the last checkpoint, and on a machine with other work
    # any rank may be slow for a while.
    by_chance = ("checkpoint", "slow", "slow_end")
    kinds = [event["kind"] for event in events if event["kind"] not in by_chance]
    assert kinds == ["start", "plan", "loss", "plan", "recovery", "finish"]
    by_kind = {event["kind"]: event for event in events}
    loss, recovery = by_kind["loss"], by_kind["recovery"]
    assert (loss["ranks"], loss["details"]["remaining"]) == ([0], [1, 2])
    assert loss["step"] == failure["step"] - 1 == recovery["step"] - 1
    assert "rank 0" in loss["text"]
    assert loss["time"] < recovery["time"] < loss["time"] + jobs.SOON_SEC
    assert recovery["details"]["recovery_sec"] == failure["seconds_to_recover"]
    assert by_kind["checkpoint"]["step"] == by_kind["finish"]["step"] == 5 * STEPS_PER_EPOCH
    metrics = jobs.read_readings(folder / "run")
    assert {tuple(line["ranks"]) for line in metrics} == {(0, 1, 2), (1, 2)}
    names = ("forward", "backward", "optimizer", "compute")
    for line in metrics:
        for phases in zip(*(line[f"{name}_time_sec"] for name in names), strict=True):
            assert sum(phases[:3]) == pytest.approx(phases[3])
            assert min(phases) > 0


def test_timeline_continues_after_the_loss(killed):
    folder, _, failure = killed
    trace = json.loads((folder / "run" / "timeline.json").read_text())
    check_trace(trace)
    happened = {event["name"] for event in trace if event["ph"] == "i"}
    assert f"loss (step {failure['step'] - 1})" in happened
    assert f"finish (step {5 * STEPS_PER_EPOCH})" in happened
    spans = spans_of(trace)
    assert {span["pid"] for span in spans if span["name"] == "recovery"} == {1, 2}
    last = [span for span in spans if span["args"].get("step") == 5 * STEPS_PER_EPOCH]
    assert {span["pid"] for span in last} == {1, 2}


def test_weights_equal_those_of_an_undisturbed_run_and_are_exported(killed, undisturbed):
    folder, ended, _ = killed
    assert "differ from the others'" not in ended.text
    assert jobs.largest_difference(jobs.weights_in(folder), jobs.weights_in(undisturbed)) < 1e-9
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")
    exported = safetensors.load_file(folder / "model.safetensors")
    assert jobs.largest_difference(exported, jobs.weights_in(folder)) == 0


def test_other_ranks_resume_from_its_checkpoint_in_mid_epoch(killed, undisturbed, tmp_path):
    checkpoint = killed[0] / "run" / "checkpoints" / "step-00000005.pt"
    (tmp_path / "taken").mkdir()
    more = f"--emulate-kinds gpu,mlu --no-parity --resume {checkpoint}".split()
    record = {"RECORD_IN": str(tmp_path / "taken")}
    ended = jobs.run_ranks(2, *EXACT, *jobs.EVEN, *more, cwd=tmp_path, **record)
    assert "resuming from step 5 (step-00000005.pt on " in ended.text
    assert jobs.steps_shown(ended) == list(range(6, 5 * STEPS_PER_EPOCH + 1))
    summary = jobs.summary_of(tmp_path)
    assert summary["global_batch_size"] == BATCH
    assert summary["failures"] == []
    taken = [jobs.read_lines(tmp_path / "taken" / str(rank)) for rank in range(2)]
    by_step = [list(itertools.chain(*parts)) for parts in zip(*taken, strict=True)]
    assert [by_step.pop(0) for _ in range(2)] == 2 * [[0, 0]]  # trials of the data and the model
    assert by_step[0] == order_of_samples(0)[5 * BATCH :]
    rest = itertools.chain(*by_step[1:])
    assert list(rest) == [sample for epoch in range(1, 5) for sample in order_of_samples(epoch)]
    assert len(by_step) == 1 + 4 * STEPS_PER_EPOCH
    assert jobs.largest_difference(jobs.weights_in(tmp_path), jobs.weights_in(undisturbed)) < 1e-9


# Several losses in one job


@pytest.mark.thorough
def test_loss_of_a_whole_group_and_of_a_rank_in_the_evaluation(tmp_path):
    command = "kaitian-train --model planted:SlowToEvaluate --epochs 2".split()
    kinds = "--emulate-kinds gpu,gpu,mlu,mlu".split()
    with jobs.Job(4, *command, *jobs.EVEN, *kinds, cwd=tmp_path, fresh=False) as job:
        job.wait_for(r"step 2/")
        job.kill(0, 1)
        job.wait_for(rf"step {STEPS_PER_EPOCH}/")
        time.sleep(0.2)
        job.kill(2)
        ended = job.finish()
    summary = jobs.summary_of(tmp_path)
    assert summary["finished"] is True
    assert (summary["ranks"], summary["groups"]) == ([3], {"mlu": [3]})
    lost = [rank["rank"] for failure in summary["failures"] for rank in failure["ranks"]]
    assert lost == [0, 1, 2]
    assert summary["failures"][-1]["step"] == STEPS_PER_EPOCH + 1
    for failure in summary["failures"]:
        assert failure["seconds_to_recover"] < jobs.SOON_SEC
    lost_at = ended.text.index(f"was lost at step {STEPS_PER_EPOCH}; 1 rank continues")
    assert lost_at < ended.text.index("epoch 1 done")
    assert ended.text.count("epoch 1 done") == ended.text.count("epoch 2 done") == 1


@pytest.mark.thorough
def test_loss_in_the_benchmark_and_replacement_by_a_spare(tmp_path):
    command = "kaitian-train --model planted:PrintsFirstStep --epochs 5 --run-dir run".split()
    flags = "--spares 2 --benchmark-seconds 3 --log-interval 0".split()
    with jobs.Job(5, *command, *flags, cwd=tmp_path, fresh=False) as job:
        job.wait_for("rank 1 computes")
        job.kill(1)
        job.wait_for(r"step 3/")
        trained_with = jobs.summary_of(tmp_path)["ranks"]
        job.kill(0)
        ended = job.finish()
    assert trained_with == [0, 2, 3]
    summary = jobs.summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [2, 3, 4]
    assert len(summary["batch_sizes"]) == 3
    assert min(summary["batch_sizes"]) > 0
    first, second = summary["failures"]
    assert [[rank["rank"] for rank in loss["ranks"]] for loss in (first, second)] == [[1], [0]]
    assert first["step"] == 1
    assert second["step"] > 3
    assert second["seconds_to_recover"] < jobs.SOON_SEC
    assert re.search(r"rank 2 \(.*\) now writes the files", ended.text)
    assert "differ from the others'" not in ended.text


# Without fault tolerance


@pytest.mark.thorough
@pytest.mark.any_mpi
def test_an_interrupted_job_resumes_to_the_same_weights(tmp_path):
    command = "kaitian-train --model planted:Dropping --epochs 3 --global-batch-size 128".split()
    often = (*command, *jobs.EVEN, *"--checkpoint-every 2 --resume auto --timeline".split())
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    ended = jobs.run_ranks(2, *command, *jobs.EVEN, cwd=whole)

    with jobs.Job(2, *often, cwd=cut, survives=False, fresh=False) as job:
        job.wait_for("fault tolerance: off")
        job.wait_for("no checkpoint in run: starting from scratch")
        job.wait_for(r"step 18/")
        # On a slow disk, the one before it would be that of an epoch's end.
        job.wait_until(
            lambda: jobs.newest_checkpoint(cut).stem >= "step-00000016", "no checkpoint of step 16"
        )
        killed_at = time.time()
        job.kill(1)
        ended = job.finish(code=None)
    assert ended.code != 0
    assert ended.ended_at - killed_at < jobs.SOON_SEC

    newest = jobs.newest_checkpoint(cut)
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    ended = jobs.run_ranks(2, *often, cwd=cut)
    assert f"] warning: checkpoint {newest.name} is damaged and ignored: " in ended.err
    step = int(re.search(r"resuming from step (\d+) \(step-", ended.out)[1])
    assert step % 12 != 0, "not in the middle of an epoch"
    assert jobs.steps_shown(ended) == list(range(step + 1, 37))
    assert jobs.summary_of(cut)["steps"] == 36
    trace = json.loads((cut / "run" / "timeline.json").read_text())
    check_trace(trace)
    starts = {e["name"]: e["ts"] for e in trace if e["ph"] == "i"}
    assert starts["start (step 0)"] < starts[f"resume (step {step})"] < starts["finish (step 36)"]
    at_once = [span for span in spans_of(trace) if span["args"].get("step") == 10]
    assert {span["pid"] for span in at_once} == {0, 1}, "the first job's are there"
    assert jobs.largest_difference(jobs.weights_in(cut), jobs.weights_in(whole)) == 0


@pytest.mark.thorough
def test_resume_with_rank_0_excluded(tmp_path):
    """Rank 0 reads the checkpoint though it does not train; alone, it trains."""
    # A single sample takes rank 0 longer than the whole batch takes the other, however busy it is.
    command = "kaitian-train --model planted:Steady --global-batch-size 8".split()
    command += "--run-dir run --log-interval 0 --resume auto --memory-format contiguous".split()
    command += "--benchmark-seconds 1 --val-split 0.02".split()
    slow = "--emulate-slowdown 0:400".split()
    ended = jobs.run_ranks(2, *command, *slow, "--max-steps", "4", cwd=tmp_path)
    assert jobs.summary_of(tmp_path)["ranks"] == [1]
    ended = jobs.run_ranks(2, *command, *slow, "--max-steps", "7", cwd=tmp_path)
    assert "resuming from step 4 (step-00000004.pt on " in ended.out
    assert jobs.summary_of(tmp_path)["ranks"] == [1]
    assert jobs.steps_shown(ended) == [5, 6, 7]
    ended = jobs.run_ranks(2, *command, *slow, "--keep-all", "--max-steps", "9", cwd=tmp_path)
    assert "--keep-all changed from False to True" in ended.out
    assert jobs.summary_of(tmp_path)["ranks"] == [0, 1]
    assert min(jobs.summary_of(tmp_path)["batch_sizes"]) >= 1
    assert jobs.steps_shown(ended) == [8, 9]
    alone = (*command, "--max-steps", "11")
    (tmp_path / "run" / "checkpoints" / "step-00000009.json").unlink()
    ended = jobs.run_alone(*alone, cwd=tmp_path)
    assert "resuming from step 7 (" in ended.out
    assert jobs.summary_of(tmp_path)["ranks"] == [0]
    assert [line["step"] for line in jobs.read_readings(tmp_path / "run")] == list(range(1, 12))


# NaN and diverged weights


def test_a_nan_step_is_skipped_and_a_diverged_rank_is_repaired(tmp_path):
    command = "kaitian-train --model planted:Faulty --epochs 3 --check-every 2".split()
    ended = jobs.run_ranks(3, *command, *jobs.EVEN, cwd=tmp_path)
    summary = jobs.summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["bad_steps"] == 1
    assert summary["steps"] == 3 * STEPS_PER_EPOCH
    assert ended.out.count("step 3 skipped: its gradient has NaN or Inf") == 1
    (bad,) = jobs.read_lines(tmp_path / "run" / "bad_steps.jsonl")
    samples = order_of_samples(0)[2 * BATCH : 3 * BATCH]
    assert bad == {"step": 3, "epoch": 0, "samples": samples}
    losses = [line["loss"] for line in jobs.read_readings(tmp_path / "run")]
    assert [step for step, loss in enumerate(losses, 1) if loss is None] == [3]
    found = re.findall(r"step (\d+): the weights of rank (.*) differ from the others'", ended.out)
    assert found == [("6", f"1 ({os.uname().nodename}, cpu)")]
    assert "copied from rank 0 (" in ended.out
    assert all(torch.isfinite(value).all() for value in jobs.weights_in(tmp_path).values())


@pytest.mark.thorough
def test_too_many_nan_steps_end_the_run_with_one_line(tmp_path):
    command = "kaitian-train --model planted:NeverFinite --max-bad-steps 3".split()
    ended = jobs.run_ranks(2, *command, *jobs.EVEN, cwd=tmp_path, code=2)
    errors = [line for line in ended.err.splitlines() if line.startswith("kaitian-train: error")]
    assert len(errors) == 1, ended.text
    assert "gradients of 3 steps in a row were not finite, the last at step 6" in errors[0]
    assert "Traceback" not in ended.text
    bad = jobs.read_lines(tmp_path / "run" / "bad_steps.jsonl")
    assert [line["step"] for line in bad] == [4, 5, 6]
