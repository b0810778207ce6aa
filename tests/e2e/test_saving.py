"""Checkpoints in real jobs that are sent signals, or whose disk is full."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import jobs
import psutil
import pytest
from shared.processes import assert_gone, processes_of

STEPS_PER_EPOCH = 6


@pytest.mark.any_mpi
def test_sigusr1_and_sigusr2_save_a_checkpoint_and_the_second_ends_the_job(tmp_path):
    command = "kaitian-train --model planted:Slow --global-batch-size 24 --workers 1".split()
    with jobs.Job(2, *command, *jobs.EVEN, cwd=tmp_path, survives=False, fresh=False) as job:
        job.wait_for(r"step 2/")
        job.signal(signal.SIGUSR1, 1)
        job.wait_until(lambda: jobs.steps_saved(tmp_path), "no checkpoint")
        saved = int(min(jobs.steps_saved(tmp_path))[5:])
        assert saved >= 2
        job.wait_for(rf"step {saved + 1}/")  # training continues
        # mpirun sends these to every process of a rank: its watchdog and data workers, too.
        ranks = job.rank_pids().values()
        processes = [process for rank in ranks for process in processes_of(rank)]
        assert len(processes) >= 2 * 4
        steps = jobs.steps_saved(tmp_path)
        job.process.send_signal(signal.SIGUSR1)
        job.wait_until(lambda: jobs.steps_saved(tmp_path) - steps, "no new one")
        assert all(process.is_running() for process in processes)
        if jobs.IS_OPEN_MPI:  # MPICH's mpirun passes on the first of them only
            job.process.send_signal(signal.SIGUSR2)
            ended = job.finish()
            saved = int(jobs.newest_checkpoint(tmp_path).stem[5:])
            said = f"step {saved} is saved, and the job ends: --resume auto resumes from it"
            assert said in ended.text
            assert saved == jobs.steps_shown(ended)[-1]
            assert jobs.summary_of(tmp_path)["finished"] is False


class SupervisedJob(jobs.Job):
    def __init__(self, *mpirun, cwd, supervisor=("kaitian-supervise",)):
        self._start(*supervisor, *jobs.forked(mpirun), cwd=cwd, env={})


def test_a_supervised_job_that_has_its_state_in_parts_saves_all_at_sigterm(tmp_path):
    mpirun = "mpirun -np 2 kaitian-train --task planted_large:chain --global-batch-size 24".split()
    mpirun += "--set width=32 --set layers=4 --epochs 900 --layout pipeline".split()
    with SupervisedJob(*mpirun, *jobs.EVEN, cwd=tmp_path) as job:
        job.wait_for(r"step \d+/")
        job.process.terminate()
        ended = job.finish(code=128 + signal.SIGTERM)
    saved = int(jobs.newest_checkpoint(tmp_path).stem[5:])
    assert saved == jobs.read_readings(tmp_path / "run")[-1]["step"]
    assert f"step {saved} is saved, and the job ends" in ended.text


# Of a minute and 4 steps, this leaves 5 s and 4 steps.
IMPATIENT = """
import kaitian_mpi.cli.supervise, kaitian_mpi.supervise.job_runner as job_runner
job_runner._SAVE_SEC = 5
kaitian_mpi.cli.supervise.main()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("hangs", [False, True], ids=["slow", "hangs"])
def test_a_supervised_job_may_collect_its_parts_for_as_long_as_they_arrive(tmp_path, hangs):
    mpirun = "mpirun -np 2 kaitian-train --task planted_large:slow_to_collect --epochs 900".split()
    mpirun += "--global-batch-size 24 --layout shard".split()
    mpirun += ["--set", f"hangs={str(hangs).lower()}"]
    supervisor = sys.executable, "-c", IMPATIENT
    with SupervisedJob(*mpirun, *jobs.EVEN, cwd=tmp_path, supervisor=supervisor) as job:
        job.wait_for(r"step \d+/")
        job.process.terminate()
        ended = job.finish(code=128 + signal.SIGTERM)
    assert "the job is saving a checkpoint; a second signal ends it at once" in ended.text
    assert ("the job has not saved in time; terminating it" in ended.text) is hangs
    assert ("is saved, and the job ends" in ended.text) is not hangs
    assert bool(jobs.steps_saved(tmp_path)) is not hangs


def prefer(job):
    """Give a job the cores before others, as root: mpirun gives a rank 0.25 s to fork."""
    children = psutil.Process(job.process.pid).children(recursive=True)
    for pid in (job.process.pid, *(each.pid for each in children), *job.rank_pids().values()):
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), -20)


@pytest.mark.serial  # a fork takes 10 to 30 ms of CPU time, and only root may prefer the job
@pytest.mark.parametrize(
    ("number", "survives", "model"),
    [
        # A large one takes longer to write than mpirun gives a rank.
        pytest.param(signal.SIGTERM, False, "Large", marks=pytest.mark.any_mpi),
        (signal.SIGTERM, True, "Slow"),
        pytest.param(signal.SIGINT, False, "Slow", marks=pytest.mark.any_mpi),
        pytest.param(signal.SIGINT, True, "Large", marks=pytest.mark.thorough),
    ],
)
def test_sigterm_and_sigint_save_a_checkpoint(tmp_path, number, survives, model):
    command = f"kaitian-train --model planted:{model} --global-batch-size 24".split()
    with jobs.Job(2, *command, *jobs.EVEN, cwd=tmp_path, survives=survives, fresh=False) as job:
        job.wait_for(r"step 3/")
        ranks = job.rank_pids()
        prefer(job)
        job.process.send_signal(number)
        signaled_at = time.time()
        ended = job.finish(code=None)  # of the process that saves, too: it has mpirun's stderr
    assert_gone(ranks.values(), jobs.SOON_SEC)
    assert ended.code != 0
    assert ended.ended_at - signaled_at < jobs.SOON_SEC
    assert jobs.steps_saved(tmp_path), ended.text
    saved = int(jobs.newest_checkpoint(tmp_path).stem[5:])
    # mpirun may have dropped the very last line; the file has it.
    assert saved >= jobs.steps_shown(ended)[-1]
    assert abs(saved - jobs.read_readings(tmp_path / "run")[-1]["step"]) <= 1
    assert f"step {saved} is saved: --resume auto resumes from it" in ended.text
    stop = jobs.read_lines(tmp_path / "run" / "events.jsonl")[-1]
    assert (stop["kind"], stop["step"]) == ("stop", saved)
    assert stop["text"] == f"step {saved} is saved: --resume auto resumes from it"
    ours = [line for line in ended.text.splitlines() if line.startswith("kaitian-train: ")]
    # MPICH's mpirun speaks of it, too.
    assert (ended.text if jobs.IS_OPEN_MPI else "".join(ours)).count("Ctrl-C") == 1
    assert "Traceback" not in ended.text


# Signals that a script sends itself

SCRIPT = str(jobs.PLANTED / "planted_signals.py")


def weights_after(ended):
    return re.search("^weights (.*)$", ended.out, re.MULTILINE)[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the weights at the end of a run that no signal has ended."""
    return weights_after(
        jobs.run_alone(jobs.PYTHON, SCRIPT, "none", cwd=tmp_path_factory.mktemp("x"))
    )


@pytest.mark.thorough
def test_what_is_swapped_into_the_model_is_not_saved_as_its_weights(tmp_path, undisturbed):
    words = (jobs.PYTHON, SCRIPT, "run")
    ended = jobs.run_alone(*words, "swapped:12=TERM", cwd=tmp_path, code=128 + signal.SIGTERM)
    assert "step 12 is not saved, as the weights were changed" in ended.err
    assert "the checkpoint of step 6 is kept" in ended.err
    assert jobs.steps_saved(tmp_path) == {"step-00000006"}
    # What the script adds to its own objects after a step is no change of the weights.
    ended = jobs.run_alone(*words, "step:8=TERM", cwd=tmp_path, code=128 + signal.SIGTERM)
    assert 'step 8 is saved: resume="auto" resumes from it' in ended.err
    assert weights_after(jobs.run_alone(*words, cwd=tmp_path)) == undisturbed


def test_a_checkpoint_that_is_being_written_is_kept_though_nothing_newer_can_be_saved(tmp_path):
    words = (jobs.PYTHON, SCRIPT, "run", "swapped:12=TERM")
    jobs.run_alone(*words, cwd=tmp_path, code=128 + signal.SIGTERM, SLOW_DISK_SEC="1")
    assert jobs.steps_saved(tmp_path) == {"step-00000006"}


def test_a_request_that_comes_before_the_first_step_is_kept(tmp_path, undisturbed):
    words = (jobs.PYTHON, SCRIPT, "run")
    ended = jobs.run_alone(*words, "made=USR2", cwd=tmp_path, OWN="SIGINT")
    assert "step 2 is saved, and the job ends" in ended.text
    assert "finished False" in ended.out
    ended = jobs.run_alone(*words, "step:7=INT", "step:8=USR1", cwd=tmp_path, OWN="SIGINT")
    assert ended.out.count("its own handler") == 1
    assert {"step-00000009", "step-00000010"} & jobs.steps_saved(tmp_path)
    assert weights_after(ended) == undisturbed


def test_a_request_to_save_without_a_run_folder_is_answered(tmp_path):
    ended = jobs.run_alone(jobs.PYTHON, SCRIPT, "none", "step:3=USR2", cwd=tmp_path)
    assert "a signal asks for a checkpoint, but there is no folder for it" in ended.out
    assert "finished True" in ended.out


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
    ended = jobs.run_alone(*command, *jobs.EVEN, cwd=tmp_path)
    said = "could not be written: No space left on device; training continues; there is no"
    assert said in ended.err
    # One that is queued behind another may be replaced by the next.
    fault = r"checkpoint of step (\d+)(?: could not be written|: an earlier one)"
    assert set(map(int, re.findall(fault, ended.err))) == {4, 6, 8, 12, 16, 18}
    summary = jobs.summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["checkpoint_fault"] == "No space left on device"
    # A checkpoint that is attempted fills the disk for a moment: a line may be lost meanwhile.
    lines = jobs.read_readings(small_disk)
    assert all(line["learning_rate"] > 0 for line in lines)  # also in the last step
    metrics = [line["step"] for line in lines]
    assert len(metrics) > 2 * STEPS_PER_EPOCH
    assert metrics == sorted(set(metrics))
    assert not list((small_disk / "checkpoints").glob("step-*"))
    assert jobs.weights_in(tmp_path)  # those of the last epoch have replaced the zeros


@pytest.mark.thorough
@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_full_disk_at_the_end_loses_nothing(small_disk, tmp_path):
    train = "kaitian-train --model cnn --dataset synthetic --max-steps 3".split()
    words = ("kaitian-supervise", *jobs.forked([*train, *jobs.EVEN]))
    ended = jobs.run_alone(*words, cwd=tmp_path, fresh=True, code=74)
    (error,) = re.findall("^kaitian-train: error: (.*)", ended.err, re.MULTILINE)
    assert "training is done, but run/checkpoints/model.pt could not be written: No space" in error
    assert ended.err.count("start 1 of 4") == 1
    assert "start 2 of 4" not in ended.err
    assert jobs.summary_of(tmp_path)["finished"] is False
    name = re.search(r"--snapshots (\w+)$", error)[1]
    (snapshots,) = Path("/dev/shm").glob(f"kaitian-{name}-*")
    assert snapshots.stat().st_mode & 0o777 == 0o700

    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    again = ("--resume", "auto", "--snapshots", name)
    ended = jobs.run_alone(*train, *jobs.EVEN, *again, cwd=tmp_path)
    assert not re.search(r"step [0-9]+/", ended.text)  # nothing is trained again
    summary = jobs.summary_of(tmp_path)
    assert summary["finished"] is True
    assert (small_disk / "checkpoints" / "model.pt").exists()
    assert not snapshots.exists()
