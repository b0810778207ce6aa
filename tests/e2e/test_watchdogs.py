"""Ranks that hang in real jobs."""

import re
import signal

import pytest
from jobs import EVEN, PYTHON, SURVIVING, Job, run_ranks, summary_of

STEPS_PER_EPOCH = 6


def test_watchdogs_kill_a_hanging_and_a_stopped_rank(tmp_path):
    command = "kaitian-train --model planted:Hanging --epochs 20 --step-timeout 3".split()
    with Job(3, *command, *EVEN, cwd=tmp_path, fresh=False) as job:
        hung = job.wait_for(r"\[(\d)@\S+\] killed by its watchdog: (.*)")
        shown = job.wait_for(r"step (\d+)/")
        job.signal(signal.SIGSTOP, 2)
        stopped = job.wait_for(r"\[(\d)@\S+\] killed by its watchdog: (.*)")
        job.finish()
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


def test_watchdogs_kill_ranks_that_hang_in_any_phase_of_the_setup(tmp_path):
    """One rank after the other, in a job that survives; mpirun's exit code is arbitrary then."""
    command = "--model planted:hanging_in_setup --dataset planted:hanging_data".split()
    command += "--step-timeout 0.2 --run-dir run --log-interval 0".split()
    command = [*"--with-ft ulfm kaitian-train".split(), *command]
    ended = run_ranks(3, *command, cwd=tmp_path, code=None)
    for rank, phase in (
        (1, r"loading the dataset \(--dataset\)"),
        (2, r"building the model \(--model\)"),
        (0, "the benchmark"),
    ):
        line = rf"^\[{rank}@\S+\] killed by its watchdog: .* s in {phase}, the limit is 4.0 s"
        assert re.search(line, ended.err, re.MULTILINE), ended.text
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["shard", "pipeline"])
def test_watchdogs_kill_a_rank_stopped_in_the_setup_and_one_in_a_step(layout, tmp_path):
    """Both after `--step-timeout`, which is a twentieth of what a phase of the setup may last."""
    command = f"kaitian-train --layout {layout} --model planted:stopping_in_setup".split()
    command += "--dataset digits --max-steps 200 --epochs 200 --step-timeout 3".split()
    with Job(3, *command, *EVEN, cwd=tmp_path, fresh=False) as job:
        killed = (
            r"\[(\d)@\S+\] killed by its watchdog: no heartbeat for (\d+).* s \(stopped\), (.*)"
        )
        in_setup = job.wait_for(killed)
        job.wait_for(r"step 3/")
        job.signal(signal.SIGSTOP, 2)
        in_step = job.wait_for(killed)
        job.finish()
    assert (in_setup[1], in_setup[3]) == ("1", "last in building the model (--model)")
    assert in_step[1] == "2"
    assert re.search(r"last in .* of step \d+", in_step[3])
    assert all(3 <= int(found[2]) < 60 for found in (in_setup, in_step))
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["ranks"], summary["steps"]) == (True, [0], 200)
    lost = [[rank["rank"] for rank in failure["ranks"]] for failure in summary["failures"]]
    assert lost == [[1], [2]]


def test_watchdogs_kill_a_rank_stopped_when_it_exits_and_the_job_ends(tmp_path):
    command = "kaitian-train --model planted:stopping_at_its_end --dataset digits".split()
    command += "--max-steps 2 --step-timeout 2".split()
    ended = run_ranks(3, *SURVIVING, *command, *EVEN, cwd=tmp_path, code=None)
    line = next(line for line in ended.err.splitlines() if "killed by its watchdog" in line)
    assert line.startswith("[1@")
    assert line.endswith(" (stopped), last in the script's own code")
    assert summary_of(tmp_path)["finished"] is True
    assert ended.seconds < 100


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [None, 1])
def test_a_rank_killed_when_it_exits_is_not_waited_for(lost, tmp_path):
    """MPI_Finalize waits for all ranks, and at times (Open MPI 5.0.11) for ever for a dead one."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, signal, sys, time\n"
        "import kaitian_mpi\n"
        "from kaitian_mpi.runtime import lifecycle\n"
        "kaitian_mpi.init()\n"
        "from mpi4py import MPI\n"
        "def kill():\n"
        "    time.sleep(0.3)  # the others have come to their end\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def finalize(finalize=lifecycle._finalize_mpi):\n"
        "    print(MPI.COMM_WORLD.rank, 'finalizes MPI', flush=True)\n"
        "    finalize()\n"
        "lifecycle._finalize_mpi = finalize\n"
        "MPI.Finalize()  # which is left until then: threads still use MPI\n"
        "if sys.argv[1] == str(MPI.COMM_WORLD.rank):\n"
        "    atexit.register(kill)\n"
    )
    ranks = 2 if lost is None else 3
    words = (*SURVIVING, PYTHON, script, str(lost))
    ended = run_ranks(ranks, *words, cwd=tmp_path, fresh=True, code=None)
    expected = [f"{rank} finalizes MPI" for rank in range(ranks) if lost is None]
    assert sorted(ended.out.splitlines()) == expected
    assert ended.seconds < 60


def test_a_rank_stopped_before_mpi_has_started_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "import kaitian_mpi\n"
        "kaitian_mpi.init()\n"
    )
    command = [*SURVIVING, PYTHON, script]
    ended = run_ranks(3, *command, cwd=tmp_path, fresh=True, code=None, KAITIAN_START_TIMEOUT="3")
    assert ended.code != 0
    assert "[0@" in ended.err
    assert "rank 1 of this host is stopped, and has not started MPI in " in ended.err
