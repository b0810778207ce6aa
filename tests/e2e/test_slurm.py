"""The files of examples/cluster on a real Slurm, whose nodes are emulated hosts."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import jobs
import pytest
from emulated_slurm import has_pmix, reason_to_skip, slurm_on_hosts

pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
needs_pmix = pytest.mark.skipif(not has_pmix(), reason="needs libpmix.so, for srun --mpi=pmix")

EXAMPLES = jobs.PLANTED.parents[1] / "examples/cluster"
SLOW = "--model planted:Slow --global-batch-size 24 --balance off --log-interval 0".split()
ONE_EACH = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1".split()
KINDS = ("nvidia", "cambricon")
LIMITED = "--global-batch-size 48 --max-steps 128"


TELL_CPUS_AND_FINISH = """\
unset OMP_NUM_THREADS OMP_THREAD_LIMIT
nproc
mkdir -p run
echo '{"finished": true}' > run/summary.json
sleep 3"""


def write_program(path, lines):
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


class Batch:
    """A Slurm, and a folder in which its jobs run."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder = slurm, folder
        own = {"PYTHONPATH": str(jobs.PLANTED), "RUN_DIR": "run"}
        self.environment = {**jobs.ENVIRONMENT, **slurm.environment, **own}

    def fork_ranks(self, *, forks=True):
        """Fork the ranks of the jobs that follow, or no longer."""
        folder = self.folder / "forking"
        if self.slurm.hosts.have_group and not folder.exists():
            jobs.write_forking_program(folder)
        first = f"{folder}:" if forks and folder.exists() else ""
        self.environment["PATH"] = f"{first}{jobs.ENVIRONMENT['PATH']}"

    def run(self, *words, folder=None):
        command, folder = self.slurm.command(*words), folder or self.folder
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        options |= {"timeout": jobs.LONGEST_SEC, "check": False}
        return subprocess.run(command, cwd=folder, env=self.environment, **options)

    def run_as_pbs_would(self, folder, arguments):
        """Run pbs.sh on the first node, which PBS would list once for each rank, as the second."""
        (folder / "planted.py").symlink_to(
            jobs.PLANTED / "planted.py"
        )  # ssh passes no PYTHONPATH on
        nodes = folder / "nodes"
        nodes.write_text("".join(f"{self.slurm.address(number)}\n" for number in (1, 2)))
        self.environment |= {
            "PBS_NODEFILE": str(nodes),
            "PBS_O_WORKDIR": str(folder),
            "PBS_JOBID": "7.server",
            "ARGUMENTS": " ".join([*SLOW, arguments]),
        }
        return self.run("bash", "-c", f"cd / && exec bash {EXAMPLES}/pbs.sh")

    def submit(self, name, *options, folder, arguments=()):
        folder.mkdir(exist_ok=True)
        words = ["sbatch", "--parsable", *options, str(EXAMPLES / name), *SLOW, *arguments]
        done = self.run(*words, folder=folder)
        assert done.returncode == 0, done.stderr
        return BatchJob(self, done.stdout.strip(), folder)


class BatchJob:
    """A job in the queue, by its number; its run is in the folder `run`."""

    def __init__(self, batch, number, folder):
        self.batch, self.number, self.folder = batch, number, folder

    @property
    def log(self):
        path = self.folder / f"kaitian-{self.number}.log"
        return path.read_text().replace("\0", "") if path.exists() else ""

    def shown(self):
        """Return what Slurm says of the job."""
        words = self.batch.slurm.ask("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_text(self, text):
        self.wait_until(lambda: text in self.log, f"no {text!r}")

    def wait_for_state(self, *states):
        self.wait_until(lambda: self.shown()["JobState"] in states, f"never {states}")

    def wait_until(self, is_true, problem):
        deadline = time.monotonic() + jobs.LONGEST_SEC
        while not is_true():
            if time.monotonic() > deadline:
                pytest.fail(f"{problem} within {jobs.LONGEST_SEC} s\n{self.shown()}\n{self.log}")
            time.sleep(0.2)

    def cancel(self, *options):
        self.batch.slurm.ask("scancel", *options, self.number)


@pytest.mark.thorough
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@needs_pmix
def test_a_task_gets_all_its_cpus(tmp_path):
    """The first one here: its hosts must be gone before those of the others are made."""
    write_program(tmp_path / "kaitian-train", TELL_CPUS_AND_FINISH)
    with slurm_on_hosts(tmp_path, [2, 2], [2, 2], KINDS, binds=True) as slurm:
        batch = Batch(slurm, tmp_path)
        batch.environment["PATH"] = f"{tmp_path}:{jobs.ENVIRONMENT['PATH']}"
        for name, nodes in (("slurm-srun.sbatch", 2), ("slurm-unlike.sbatch", 1)):
            if nodes == 1:  # srun may not return from two components: the script must not wait
                write_program(tmp_path / "srun", f'{shutil.which("srun")} "$@"; exec sleep 1000')
            options = f"--nodes={nodes} --ntasks-per-node=1 --cpus-per-task=2".split()
            job = batch.submit(name, *options, folder=tmp_path / name)
            job.wait_for_state("COMPLETED")
            assert job.log.split()[:2] == ["2", "2"]


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "jobs").mkdir()
    with slurm_on_hosts(folder, [2, 1], [16, 16], KINDS) as slurm:
        yield Batch(slurm, folder / "jobs")
    remove_folders_of_killed_launchers()


def remove_folders_of_killed_launchers():
    """Remove what Slurm has let mpirun's processes leave: a later one with the pid cannot start."""
    for name in ("ompi.[0-9]*", "prted.[0-9]*"):
        for left in Path(tempfile.gettempdir()).glob(name):
            if not Path("/proc", left.suffix[1:]).exists():
                shutil.rmtree(left, ignore_errors=True)


@pytest.fixture(scope="module")
def limited(batch):
    """A job that reaches its time limit while others run.

    Slurm looks at limits every 30 s, and sends the signal if 31 s are left at most: not before a
    busy machine has begun to train. In a minute, 125 such steps can be done at most.
    """
    options = [*ONE_EACH, *"--time=1 --signal=B:USR1@1".split()]
    job = {"folder": batch.folder / "limited", "arguments": LIMITED.split()}
    batch.fork_ranks()  # fresh ones might not have begun by then on a busy machine
    job = batch.submit("slurm.sbatch", *options, **job)
    batch.fork_ranks(forks=False)
    return job


def check_steps(folder, last):
    """Check that a run has done each step up to its last one once, whatever has interrupted it."""
    log = "".join(path.read_text() for path in sorted(folder.glob("kaitian-*.log")))
    done = [line["step"] for line in jobs.read_readings(folder / "run") if "step" in line]
    assert done == sorted(set(done)), log
    # The line of a step that ends as the signal arrives may be lost; the checkpoint has the step.
    saved = {int(step) for step in re.findall(r"step (\d+) (?:is saved|\(step-)", log)}
    assert set(range(1, last + 1)) - set(done) <= saved, log
    shown = re.findall(r"\| step (\d+)/", log)
    assert len(shown) == len(set(shown)), log
    assert jobs.summary_of(folder)["steps"] == last


def test_a_single_rank_in_a_larger_allocation_is_refused(batch, limited):
    train = ["kaitian-train", "--model", "cnn"]
    for words, flag in ((["srun"], "--mpi=pmix"), (["salloc"], "mpirun")):
        done = batch.run(*words, *ONE_EACH, *train)
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if "error: " in line and flag in line]
        assert line.startswith("kaitian-train: error: ")


@needs_pmix
def test_a_run_goes_on_under_mpirun_srun_and_on_unlike_nodes(batch, limited):
    folder = batch.folder / "passed-on"
    common = {"folder": folder, "arguments": ["--max-steps", "16"]}

    job = batch.submit("slurm.sbatch", *ONE_EACH, **common)
    job.wait_for_text("step 3/")
    with batch.slurm.hosts.preferred():
        job.cancel()
        job.wait_for_state("CANCELLED")
    assert "--resume auto resumes from it" in job.log
    (first,) = jobs.steps_saved(folder)

    batch.fork_ranks()
    job = batch.submit("slurm-srun.sbatch", *ONE_EACH, **common)
    job.wait_for_text("resuming from step")
    job.wait_for_text("step 6/")
    job.cancel("--batch", "--signal=USR1")  # as at the limit
    job.wait_for_state("PENDING")
    assert job.shown()["Restarts"] == "1"
    job.cancel()
    assert max(jobs.steps_saved(folder)) > first

    (folder / "hurry").touch()

    job = batch.submit("slurm-unlike.sbatch", "--ntasks-per-node=1", "--cpus-per-task=1", **common)
    job.wait_for_state("COMPLETED")
    check_steps(folder, 16)
    summary = jobs.summary_of(folder)
    assert summary["finished"] is True
    assert "| host2 |" in job.log

    done = batch.run_as_pbs_would(folder, "--max-steps 18")
    assert done.returncode == 0, done.stderr
    check_steps(folder, 18)


def test_a_job_at_its_time_limit_is_requeued_and_finishes(batch, limited):
    with batch.slurm.hosts.preferred():
        limited.wait_until(lambda: int(limited.shown()["Restarts"]) >= 1, "never requeued")
    assert "--resume auto resumes from it" in limited.log
    (limited.folder / "hurry").touch()  # not before, or the job ends before its limit does
    # Else the rest has to be done within the next 30 s.
    limited.batch.slurm.ask("scontrol", "update", f"JobId={limited.number}", "TimeLimit=10")
    limited.wait_for_state("COMPLETED", "FAILED")
    assert limited.shown()["JobState"] == "COMPLETED", limited.log
    assert "resuming from step" in limited.log
    check_steps(limited.folder, 128)
    assert jobs.summary_of(limited.folder)["finished"] is True
