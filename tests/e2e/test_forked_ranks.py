"""The process beside mpirun that forks the ranks of `kaitian-train -n`, and its ends."""

import os
import re
import signal
from contextlib import suppress

import psutil
import pytest
from jobs import EVEN, SOON_SEC, LaunchedJob, summary_of
from shared.processes import assert_gone

from kaitian_mpi.runtime.forked_rank import FORK

TRAIN = ["kaitian-train", "-n", "2", "--model", "planted:Slow", *EVEN]

pytestmark = pytest.mark.thorough  # a job without tests of it has its ranks forked as well


def forking_process(job):
    """Return the process that forks a job's ranks; None if there is none."""
    for child in psutil.Process(job.process.pid).children():
        with suppress(psutil.Error):  # it has ended, or is not started yet
            if "forking_process.py" in " ".join(child.cmdline()):
                return child
    return None


def test_forked_ranks_train_as_others_do(tmp_path):
    losses = []
    for forks in ("1", "0"):
        folder = tmp_path / forks
        folder.mkdir()
        command = [*TRAIN, "--max-steps", "3", "--seed", "1"]
        with LaunchedJob(*command, cwd=folder, **{FORK: forks}) as job:
            job.wait_for("step 1/")
            ranks = job.rank_pids()
            forking = forking_process(job)
            parents = {psutil.Process(pid).ppid() for pid in ranks.values()}
            assert (forking is not None) == (forks == "1")
            assert forking is None or parents == {forking.pid}
            ended = job.finish()
        losses.append(re.search(r"^finished .* loss (\d+\.\d+)", ended.text, re.MULTILINE)[1])
    assert losses[0] == losses[1]


def test_what_stands_for_a_rank_stops_and_ends_it_and_no_rank_outlives_what_forks(tmp_path):
    with LaunchedJob(*TRAIN, "--max-steps", "400", cwd=tmp_path) as job:
        job.wait_for("step 2/")
        started = [process.pid for process in job.started()]
        rank = job.rank_pids()[1]
        (stands_for,) = [pid for pid in started if name_of(pid) == f"for-{rank}"]
        process = psutil.Process(rank)
        os.kill(stands_for, signal.SIGSTOP)  # as for a Ctrl-Z, by mpirun
        job.wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the rank is not stopped")
        os.kill(stands_for, signal.SIGCONT)
        job.wait_for("step ")
        os.kill(stands_for, signal.SIGKILL)
        job.wait_for(r"rank 1 \(.*\) was lost")
        assert_gone([rank], SOON_SEC)
        job.wait_for("step ")
        forking_process(job).kill()
        ended = job.finish(code=None)
        assert ended.code not in (0, 2)
        assert_gone(started, SOON_SEC)


def test_ranks_load_torch_themselves_if_what_forks_ends_early(tmp_path):
    with LaunchedJob(*TRAIN, "--max-steps", "2", cwd=tmp_path) as job:
        job.wait_until(lambda: forking_process(job) is not None, "nothing forks ranks")
        forking_process(job).kill()
        job.wait_for("step 1/")
        assert sorted(job.rank_pids()) == [0, 1]
        job.finish()
    assert summary_of(tmp_path)["ranks"] == [0, 1]


def name_of(pid):
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""
