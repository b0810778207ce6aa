"""Ranks that die, hang or diverge in real jobs, and jobs that resume from checkpoints."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from jobs import EVEN, Job, finish, run_ranks, start, steps_shown, summary_of

from kaitian_mpi.data.sampler import LoadAdaptiveSampler

SAMPLES = 1438  # of the digits, for training
BATCH = 256
STEPS_PER_EPOCH = 6
RECOVERY_LIMIT_SEC = 10
LIMIT_SEC = 5

EXACT = "kaitian-train --model planted:exact --dataset planted:recorded_digits --epochs 5".split()


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights_in(folder):
    return torch.load(folder / "run" / "checkpoints" / "model.pt", weights_only=True)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[key] - other[key]).abs().max().item() for key in one)


def order_of_samples(epoch):
    sampler = LoadAdaptiveSampler(range(SAMPLES), [BATCH], 0, seed=0)
    sampler.set_epoch(epoch)
    return sampler.indices(0, SAMPLES)


def newest_checkpoint(folder):
    return max((folder / "run" / "checkpoints").glob("step-*.json")).with_suffix(".pt")


def steps_saved(folder):
    return {path.stem for path in (folder / "run" / "checkpoints").glob("step-*.json")}


# Loss of rank 0 of three


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same training on one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = finish(start(*EXACT, *EVEN, cwd=folder), time.time())
    assert ended.code == 0, ended.text
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Three ranks, of which rank 0 is killed in training."""
    folder = tmp_path_factory.mktemp("killed")
    often = "--checkpoint-every 5 --keep-checkpoints 99 --check-every 5".split()
    with Job(3, *EXACT, *EVEN, *often, cwd=folder) as job:
        job.wait_for(r"step 8/")
        job.kill(0)
        return folder, job.finish()


def test_job_survives_the_loss_of_rank_0(killed):
    folder, ended = killed
    assert ended.code == 0, ended.text
    assert "fault tolerance: on" in ended.text
    summary = summary_of(folder)
    assert summary["finished"] is True
    assert summary["ranks"] == [1, 2]
    assert summary["steps"] == 5 * STEPS_PER_EPOCH
    assert summary["global_batch_size"] == BATCH
    (failure,) = summary["failures"]
    (lost,) = failure["ranks"]
    assert lost["rank"] == 0
    assert lost["host"] == os.uname().nodename
    assert 8 < failure["step"] < 5 * STEPS_PER_EPOCH
    assert 0 < failure["seconds_to_recover"] < RECOVERY_LIMIT_SEC
    assert f"step {failure['step'] - 1}: rank 0 ({lost['host']}" in ended.text
    assert "Traceback" not in ended.text


def test_output_and_files_continue_after_the_loss(killed):
    folder, ended = killed
    (failure,) = summary_of(folder)["failures"]
    every = list(range(1, 5 * STEPS_PER_EPOCH + 1))
    # Rank 0 may have died after a step was done and before it printed its line.
    without = [step for step in every if step != failure["step"] - 1]
    assert steps_shown(ended) in (every, without)
    metrics = read_lines(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] in (every, without)
    assert {len(line["wait_time_sec"]) for line in metrics} == {3, 2}
    plans = read_lines(folder / "run" / "plan.jsonl")
    assert [plan["step"] for plan in plans] == [0, failure["step"] - 1]
    assert [sum(plan["batch_sizes"]) for plan in plans] == [BATCH, BATCH]
    assert [len(plan["batch_sizes"]) for plan in plans] == [3, 2]
    assert not list(folder.rglob("*.partial"))


def test_weights_equal_those_of_an_undisturbed_run(killed, undisturbed):
    folder, ended = killed
    assert "differ from the others'" not in ended.text
    assert largest_difference(weights_in(folder), weights_in(undisturbed)) < 1e-9


def test_other_ranks_resume_from_its_checkpoint_in_mid_epoch(killed, undisturbed, tmp_path):
    checkpoint = killed[0] / "run" / "checkpoints" / "step-00000005.pt"
    (tmp_path / "taken").mkdir()
    ended = run_ranks(
        2,
        *EXACT,
        *EVEN,
        *f"--emulate-kinds gpu,mlu --resume {checkpoint}".split(),
        cwd=tmp_path,
        RECORD_IN=str(tmp_path / "taken"),
    )
    assert ended.code == 0, ended.text
    assert "resuming from step 5 (step-00000005.pt on " in ended.text
    assert steps_shown(ended) == list(range(6, 5 * STEPS_PER_EPOCH + 1))
    summary = summary_of(tmp_path)
    assert summary["global_batch_size"] == BATCH
    assert summary["failures"] == []
    taken = [read_lines(tmp_path / "taken" / str(rank)) for rank in range(2)]
    by_step = [list(itertools.chain(*parts)) for parts in zip(*taken, strict=True)]
    assert by_step[0] == order_of_samples(0)[5 * BATCH :]
    for epoch in range(1, 5):
        first = 1 + (epoch - 1) * STEPS_PER_EPOCH
        of_epoch = by_step[first : first + STEPS_PER_EPOCH]
        assert list(itertools.chain(*of_epoch)) == order_of_samples(epoch)
    assert len(by_step) == 1 + 4 * STEPS_PER_EPOCH
    assert largest_difference(weights_in(tmp_path), weights_in(undisturbed)) < 1e-9


# Several losses in one job


def test_loss_of_a_whole_group_and_of_a_rank_in_the_evaluation(tmp_path):
    command = "kaitian-train --model planted:slow_to_evaluate --epochs 2".split()
    kinds = "--emulate-kinds gpu,gpu,mlu,mlu".split()
    with Job(4, *command, *EVEN, *kinds, cwd=tmp_path) as job:
        job.wait_for(r"step 2/")
        job.kill(0, 1)
        job.wait_for(rf"step {STEPS_PER_EPOCH}/")
        time.sleep(0.2)
        job.kill(2)
        ended = job.finish()
    assert ended.code == 0, ended.text
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [3]
    assert summary["groups"] == {"mlu": [3]}
    lost = [rank["rank"] for failure in summary["failures"] for rank in failure["ranks"]]
    assert lost == [0, 1, 2]
    assert summary["failures"][-1]["step"] == STEPS_PER_EPOCH + 1
    for failure in summary["failures"]:
        assert failure["seconds_to_recover"] < RECOVERY_LIMIT_SEC
    lost_at = ended.text.index(f"step {STEPS_PER_EPOCH}: rank 2 (")
    assert lost_at < ended.text.index("epoch 1 done")
    assert ended.text.count("epoch 1 done") == ended.text.count("epoch 2 done") == 1


def test_loss_in_the_benchmark_and_replacement_by_a_spare(tmp_path):
    command = "kaitian-train --model planted:prints_first_step --epochs 5 --run-dir run".split()
    flags = "--spares 2 --benchmark-seconds 3 --log-interval 0".split()
    with Job(5, *command, *flags, cwd=tmp_path) as job:  # the second spare is never needed
        job.wait_for("rank 1 computes")
        job.kill(1)
        job.wait_for(r"step 3/")
        trained_with = summary_of(tmp_path)["ranks"]
        job.kill(0)
        ended = job.finish()
    assert ended.code == 0, ended.text
    assert trained_with == [0, 2]
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [2, 3]
    assert len(summary["batch_sizes"]) == 2
    assert min(summary["batch_sizes"]) > 0
    lost = [[rank["rank"] for rank in failure["ranks"]] for failure in summary["failures"]]
    assert lost == [[1], [0]]
    assert summary["failures"][0]["step"] == 1
    assert summary["failures"][1]["step"] > 3
    assert summary["failures"][1]["seconds_to_recover"] < RECOVERY_LIMIT_SEC
    assert re.search(r"rank 2 \(.*\) now writes the files", ended.text)
    assert "differ from the others'" not in ended.text


# Without fault tolerance


def test_an_interrupted_job_resumes_to_the_same_weights(tmp_path):
    command = "kaitian-train --model planted:dropping --epochs 3 --global-batch-size 128".split()
    often = (*command, *EVEN, *"--checkpoint-every 2 --resume auto".split())
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    ended = run_ranks(2, *command, *EVEN, cwd=whole)
    assert ended.code == 0, ended.text

    with Job(2, *often, cwd=cut, survives=False) as job:
        job.wait_for("fault tolerance: off")
        job.wait_for("found no checkpoint in run: starting from scratch")
        job.wait_for(r"step 18/")
        killed_at = time.time()
        job.kill(1)
        ended = job.finish()
    assert ended.code != 0
    assert ended.ended_at - killed_at < LIMIT_SEC

    newest = newest_checkpoint(cut)
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    ended = run_ranks(2, *often, cwd=cut)
    assert ended.code == 0, ended.text
    assert f"] warning: checkpoint {newest.name} is damaged and ignored: " in ended.err
    step = int(re.search(r"resuming from step (\d+) \(step-", ended.out)[1])
    assert step % 12 != 0, "not in the middle of an epoch"
    assert steps_shown(ended) == list(range(step + 1, 37))
    assert summary_of(cut)["steps"] == 36
    assert largest_difference(weights_in(cut), weights_in(whole)) == 0


def test_resume_with_rank_0_excluded(tmp_path):
    """Rank 0 reads the checkpoint though it does not train; alone, it trains."""
    command = "kaitian-train --model cnn --global-batch-size 16 --benchmark-seconds 1".split()
    command += "--run-dir run --log-interval 0 --resume auto".split()
    slow = "--emulate-slowdown 0:200".split()
    ended = run_ranks(2, *command, *slow, "--max-steps", "4", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert summary_of(tmp_path)["ranks"] == [1]
    ended = run_ranks(2, *command, *slow, "--max-steps", "7", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert "resuming from step 4 (step-00000004.pt on " in ended.out
    assert summary_of(tmp_path)["ranks"] == [1]
    assert steps_shown(ended) == [5, 6, 7]
    ended = run_ranks(2, *command, "--keep-all", "--max-steps", "9", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert "--keep-all changed from False to True" in ended.out
    assert summary_of(tmp_path)["ranks"] == [0, 1]
    assert steps_shown(ended) == [8, 9]
    alone = (*command, "--max-steps", "11")
    (tmp_path / "run" / "checkpoints" / "step-00000009.json").unlink()
    ended = finish(start(*alone, cwd=tmp_path), time.time())
    assert ended.code == 0, ended.text
    assert "resuming from step 7 (" in ended.out
    assert summary_of(tmp_path)["ranks"] == [0]
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == list(
        range(1, 12)
    )


def test_sigusr1_and_sigusr2_save_a_checkpoint(tmp_path):
    command = "kaitian-train --model planted:slow --global-batch-size 24 --workers 1".split()
    with Job(2, *command, *EVEN, cwd=tmp_path, survives=False) as job:
        job.wait_for(r"step 2/")
        job.signal(signal.SIGUSR1, 1)
        asked_at = time.time()
        while not (saved := list((tmp_path / "run" / "checkpoints").glob("step-*.json"))):
            assert time.time() - asked_at < 6 * LIMIT_SEC
            time.sleep(0.05)
        assert 2 <= int(saved[0].stem[5:])
        job.wait_for(rf"step {int(saved[0].stem[5:]) + 1}/")  # training continues
        # mpirun sends these to every process of a rank: its watchdog and data workers, too.
        processes = psutil.Process(job.process.pid).children(recursive=True)
        assert len(processes) >= 2 * 4
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            steps = steps_saved(tmp_path)
            job.process.send_signal(number)
            asked_at = time.time()
            while not steps_saved(tmp_path) - steps:
                assert time.time() - asked_at < 6 * LIMIT_SEC
                time.sleep(0.05)
        assert all(process.is_running() for process in processes)


@pytest.mark.parametrize(
    ("number", "survives", "model"),
    [
        (signal.SIGTERM, False, "large"),  # takes longer to write than mpirun gives a rank
        (signal.SIGTERM, True, "slow"),
        (signal.SIGINT, False, "slow"),
        (signal.SIGINT, True, "large"),
    ],
)
def test_sigterm_and_sigint_save_a_checkpoint_before_the_job_ends(
    tmp_path, number, survives, model
):
    command = f"kaitian-train --model planted:{model} --global-batch-size 24".split()
    with Job(2, *command, *EVEN, cwd=tmp_path, survives=survives) as job:
        job.wait_for(r"step 3/")
        job.process.send_signal(number)
        signalled_at = time.time()
        ended = job.finish()
    assert ended.code != 0
    assert ended.ended_at - signalled_at < LIMIT_SEC
    assert steps_saved(tmp_path), ended.text
    saved = int(newest_checkpoint(tmp_path).stem[5:])
    # mpirun may have dropped the very last line; the file has it.
    assert saved >= steps_shown(ended)[-1]
    assert abs(saved - read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]) <= 1
    assert f"step {saved} is saved: --resume auto resumes from it" in ended.text
    assert "Traceback" not in ended.text


# Ranks that hang


def test_watchdogs_kill_a_hanging_and_a_stopped_rank(tmp_path):
    command = "kaitian-train --model planted:hanging --epochs 20 --step-timeout 3".split()
    with Job(3, *command, *EVEN, cwd=tmp_path) as job:
        hung = job.wait_for(r"\[(\d)@\S+\] killed by its watchdog: (.*)")
        shown = job.wait_for(r"step (\d+)/")
        job.signal(signal.SIGSTOP, 2)
        stopped = job.wait_for(r"\[(\d)@\S+\] killed by its watchdog: (.*)")
        ended = job.finish()
    assert ended.code == 0, ended.text
    assert hung[1] == "1"
    assert re.search(r"in forward of step 5, the limit is 3.0 s \(--step-timeout\)", hung[2])
    assert int(shown[1]) == 5
    assert stopped[1] == "2"
    assert re.search(r"no heartbeat for .* s \(.*stopped.*\), last in .* step \d+", stopped[2])
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [0]
    assert summary["steps"] == 20 * STEPS_PER_EPOCH
    lost = [[rank["rank"] for rank in failure["ranks"]] for failure in summary["failures"]]
    assert lost == [[1], [2]]
    assert summary["failures"][0]["step"] == 5


def test_watchdog_kills_a_rank_that_hangs_while_loading_data(tmp_path):
    command = "kaitian-train --model cnn --dataset planted:hanging_data --step-timeout 0.4".split()
    ended = run_ranks(2, *command, *EVEN, cwd=tmp_path)
    assert ended.code != 0
    assert re.search(
        r"^\[1@\S+\] killed by its watchdog: .* s in loading the dataset \(--dataset\), "
        r"the limit is 8.0 s",
        ended.err,
        re.MULTILINE,
    ), ended.text


def test_watchdogs_kill_ranks_that_hang_in_any_phase_of_the_setup(tmp_path):
    """One rank after the other, in a job that survives; mpirun's exit code is arbitrary then."""
    command = "--model planted:hanging_in_setup --dataset planted:hanging_data".split()
    command += "--step-timeout 0.2 --run-dir run --log-interval 0".split()
    ended = run_ranks(3, *"--with-ft ulfm kaitian-train".split(), *command, cwd=tmp_path)
    for rank, phase in (
        (1, r"loading the dataset \(--dataset\)"),
        (2, r"building the model \(--model\)"),
        (0, "the benchmark"),
    ):
        line = rf"^\[{rank}@\S+\] killed by its watchdog: .* s in {phase}, the limit is 4.0 s"
        assert re.search(line, ended.err, re.MULTILINE), ended.text
    assert not (tmp_path / "run" / "summary.json").exists()


# NaN and diverged weights


def test_a_nan_step_is_skipped_and_a_diverged_rank_is_repaired(tmp_path):
    command = "kaitian-train --model planted:faulty --epochs 3 --check-every 2".split()
    ended = run_ranks(3, *command, *EVEN, cwd=tmp_path)
    assert ended.code == 0, ended.text
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["bad_steps"] == 1
    assert summary["steps"] == 3 * STEPS_PER_EPOCH
    assert ended.out.count("step 3 is skipped: its gradient is not finite") == 1
    (bad,) = read_lines(tmp_path / "run" / "bad_steps.jsonl")
    samples = order_of_samples(0)[2 * BATCH : 3 * BATCH]
    assert bad == {"step": 3, "epoch": 0, "samples": samples}
    found = re.findall(r"step (\d+): the weights of rank (.*) differ from the others'", ended.out)
    assert found == [("6", f"1 ({os.uname().nodename}, cpu)")]
    assert "copied from rank 0 (" in ended.out
    assert all(torch.isfinite(value).all() for value in weights_in(tmp_path).values())


def test_too_many_nan_steps_end_the_run_with_one_line(tmp_path):
    command = "kaitian-train --model planted:never_finite --max-bad-steps 3".split()
    ended = run_ranks(2, *command, *EVEN, cwd=tmp_path)
    assert ended.code == 2, ended.text
    errors = [line for line in ended.err.splitlines() if line.startswith("kaitian-train: error")]
    assert len(errors) == 1, ended.text
    assert "no finite gradient in 3 steps in a row, the last of them step 6" in errors[0]
    assert "Traceback" not in ended.text
    bad = read_lines(tmp_path / "run" / "bad_steps.jsonl")
    assert [line["step"] for line in bad] == [4, 5, 6]


# A full disk


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system with room for the model twice and some text; or of the size given."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = shutil.which("mount")
    size = ("-t", "tmpfs", "-o", f"size={getattr(request, 'param', '5500k')}", "tmpfs", str(folder))
    if mount is None or subprocess.run([mount, *size], check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_training_continues_if_checkpoints_do_not_fit_on_the_disk(small_disk, tmp_path):
    # Room for the model beside that of the previous epoch, but not for a checkpoint.
    (small_disk / "checkpoints").mkdir()
    (small_disk / "checkpoints" / "model.pt").write_bytes(bytes(2_400_000))
    command = "kaitian-train --model planted:wide --epochs 3 --checkpoint-every 4".split()
    ended = finish(start(*command, *EVEN, cwd=tmp_path), time.time())
    assert ended.code == 0, ended.text
    assert (
        "could not be written: No space left on device; training continues, there is none yet"
        in ended.err
    )
    # One that is queued behind another may be replaced by the next.
    reported = re.findall(
        r"checkpoint of step (\d+) (?:could not be written|is skipped)", ended.err
    )
    assert set(map(int, reported)) == {4, 6, 8, 12, 16, 18}
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    # A checkpoint that is attempted fills the disk for a moment: a line may be lost meanwhile.
    lines = read_lines(small_disk / "metrics.jsonl")
    assert all(line["learning_rate"] > 0 for line in lines)  # also in the last step
    metrics = [line["step"] for line in lines]
    assert len(metrics) > 2 * STEPS_PER_EPOCH
    assert metrics == sorted(set(metrics))
    assert not list((small_disk / "checkpoints").glob("step-*"))
    assert weights_in(tmp_path)  # those of the last epoch have replaced the zeros


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_full_disk_at_the_end_loses_nothing(small_disk, tmp_path):
    train = "kaitian-train --model cnn --dataset synthetic --max-steps 3".split()
    ended = finish(start("kaitian-supervise", *train, *EVEN, cwd=tmp_path), time.time())
    assert ended.code == 74, ended.text
    (error,) = re.findall("^kaitian-train: error: (.*)", ended.err, re.MULTILINE)
    assert "training is done, but run/checkpoints/model.pt could not be written: No space" in error
    assert ended.err.count("start 1 of 4") == 1
    assert "start 2 of 4" not in ended.err
    assert summary_of(tmp_path)["finished"] is False
    name = re.search(r"--snapshots (\w+)$", error)[1]
    (snapshots,) = Path("/dev/shm").glob(f"kaitian-{name}-*")
    assert snapshots.stat().st_mode & 0o777 == 0o700

    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    again = ("--resume", "auto", "--snapshots", name)
    ended = finish(start(*train, *EVEN, *again, cwd=tmp_path), time.time())
    assert ended.code == 0, ended.text
    assert not re.search(r"step [0-9]+/", ended.text)  # nothing is trained again
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert (small_disk / "checkpoints" / "model.pt").exists()
    assert not snapshots.exists()
