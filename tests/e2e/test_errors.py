"""However a job fails: the right message, a non-zero exit code, all ranks gone soon."""

import json
import re
import time
from functools import cache

import pytest
from command_lines import Result, run_each
from jobs import PYTHON, SOON_SEC, SURVIVING, Job, finish, start
from shared.processes import assert_gone

TRAIN = ("kaitian-train", "--model", "cnn")


BEFORE_MPI = {
    "--epochs -1": "--epochs must be a whole number, at least 0",
    "--log-interval inf": "--log-interval must be a number, at least 0 and at most 1e9, not inf",
    "--model nosuch": "--model: there is no model 'nosuch'; give mobilenetv2",
    "--export model.pt": "--export must be a file named *.safetensors, not 'model.pt'; the run",
    "--no-such-flag": "unrecognized arguments: --no-such-flag; see kaitian-train --help",
}
BEFORE_TORCH = {
    "--emulate-kinds gpu": "--emulate-kinds gpu: give one kind per rank; mpirun has started 4",
    "--emulate-slowdown 9:2": "--emulate-slowdown: '9:2' is not a slowdown",
    "--global-batch-size 2": "--global-batch-size 2 is too small for 4 ranks",
    "--dataset cifar10 --data-dir nowhere": "--data-dir nowhere: No such file or directory; name",
}
LATER = {
    "--dataset cifar10 --data-dir .": "data_batch_1",
    "--model planted:nosuch": "module planted has no attribute 'nosuch'",
    "--model planted:not_a_model": "it must return a torch.nn.Module",
    "--devices cuda:7,cuda:7": "--devices cuda:7",
    "--model planted:differing": "the model differs between ranks:",
    "--model planted:raise_error": "cannot be called with num_classes=... alone",
    "--init nosuch.pt": "--init nosuch.pt: No such file or directory",
    "--init used/config.json": "--init used/config.json: it has no weights (it holds",
    "--export nowhere/model.safetensors": "No such file or directory; name a file in a folder",
    "--run-dir used": "--run-dir used: the folder has the results of another run",
    "--run-dir /dev/null/run": "--run-dir /dev/null/run: Not a directory; choose a writable",
}
WITHOUT_ULFM = pytest.param((), marks=pytest.mark.any_mpi, id="")
WITH_AND_WITHOUT_ULFM = pytest.mark.parametrize(
    "options", [WITHOUT_ULFM, pytest.param(SURVIVING, id="survive")]
)


@pytest.fixture(scope="module")
def run_all(tmp_path_factory):
    """Run kaitian-train with each of several flags in one job, once per module."""

    @cache
    def run(ranks, flags, options=(), fresh=True):
        folder = tmp_path_factory.mktemp("errors")
        (folder / "used").mkdir()
        (folder / "used" / "config.json").write_text("{}")
        found = run_each(ranks, TRAIN, flags, *options, cwd=folder, fresh=fresh)
        assert (folder / "used" / "config.json").read_text() == "{}"
        return found

    return run


@pytest.mark.parametrize("flags", BEFORE_MPI)
def test_an_error_found_before_mpi_is_loaded(run_all, flags):
    """One rank is enough: it has not heard of the others yet."""
    results, _ = run_all(1, tuple(BEFORE_MPI))
    assert_user_error(results[flags], BEFORE_MPI[flags])
    assert results[flags].loaded == set()


@pytest.mark.parametrize(
    "options", [WITHOUT_ULFM, pytest.param(SURVIVING, marks=pytest.mark.thorough, id="survive")]
)
@pytest.mark.parametrize("flags", BEFORE_TORCH)
def test_an_error_found_before_torch_is_loaded(run_all, options, flags):
    results, _ = run_all(4, tuple(BEFORE_TORCH), options)
    assert_user_error(results[flags], BEFORE_TORCH[flags])
    assert results[flags].loaded == {"mpi4py.MPI"}


@WITH_AND_WITHOUT_ULFM
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(*list(BEFORE_MPI.items())[-1], marks=pytest.mark.thorough),
        list(BEFORE_TORCH.items())[-1],
    ],
)
def test_an_early_error_ends_every_rank_at_once(mpirun, options, flags, message):
    ended = mpirun(4, *options, *TRAIN, *flags.split(), fresh=True, code=None)
    assert_user_error(Result([ended.code], ended.text, frozenset()), message)
    assert ended.seconds < SOON_SEC


@pytest.mark.parametrize("flags", LATER)
def test_an_error_found_later(run_all, flags):
    results, _ = run_all(2, tuple(LATER), fresh=False)
    assert_user_error(results[flags], LATER[flags])


def test_an_error_found_later_ends_the_job(run_all):
    _, whole = run_all(2, tuple(LATER), fresh=False)
    assert_user_error(whole, list(LATER.values())[-1])


def assert_user_error(result, message):
    assert set(result.codes) == {2}, result.text
    errors = [line for line in result.text.splitlines() if line.startswith("kaitian-train: error")]
    assert len(errors) == 1, result.text
    assert message in errors[0]
    assert "Traceback" not in result.text


@pytest.mark.thorough
def test_a_kind_with_a_wrong_kernel_ends_the_job_unless_it_is_not_to_be_compared(mpirun, tmp_path):
    command = "kaitian-train --model planted:with_wrong_kernel --emulate-kinds gpu,mlu".split()
    command += "--balance off --max-steps 1 --run-dir run".split()
    ended = mpirun(2, *command, code=None)
    message = "by more than rounding on mlu (rank 1 ("
    assert_user_error(Result([ended.code], ended.text, frozenset()), message)
    assert not json.loads((tmp_path / "run/parity.json").read_text())["agrees"]
    assert not (tmp_path / "run/metrics.jsonl").exists()
    ended = mpirun(2, *command, "--no-parity", "--run-dir", "other")
    assert "parity" not in ended.text


@pytest.mark.thorough
def test_a_rank_that_dies_in_the_comparison_of_kinds_is_survived(mpirun, tmp_path):
    command = "kaitian-train --model planted:DiesInFirstForward --balance off".split()
    command += "--max-steps 2 --emulate-kinds gpu,mlu,cpu --run-dir run".split()
    ended = mpirun(3, *SURVIVING, *command)
    assert re.search(r"rank 1 \(.*, mlu\) was lost at step 0; 2 ranks", ended.out), ended.text
    kinds = json.loads((tmp_path / "run/parity.json").read_text())["kinds"]
    assert [kind["rank"] for kind in kinds] == [0, 2]


# A plain script that fails on one rank must not leave the others waiting.
SCRIPT = """
import time, torch, torch.distributed as dist, kaitian_mpi

world = kaitian_mpi.init()
dist.all_reduce(torch.ones(1))
if world.rank == 2:
    print(f"fault at {time.time()}", flush=True)
    raise RuntimeError("planted")
dist.all_reduce(torch.ones(1))
"""
FAILING = "kaitian-train --balance off --global-batch-size 24 --model planted:"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (f"{FAILING}raising", 1, r"ValueError: planted$"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (f"{FAILING}exiting", 3, r"sys\.exit\(3\) before the run was complete"),
                (f"{FAILING}leaving", 1, r"sys\.exit\(0\) before the run was complete"),
                (f"{PYTHON} script.py", 1, r"RuntimeError: planted$"),
            )
        ),
    ],
    ids=["raising", "exiting", "leaving", "a script"],
)
@WITH_AND_WITHOUT_ULFM
def test_a_failing_rank_ends_the_job(mpirun, options, command, code, message):
    fresh = "script" in command and not options
    # mpirun --with-ft ulfm ends a job itself if one of two ranks exits.
    ended = mpirun(3, *options, *command.split(), code=code, fresh=fresh, script=SCRIPT)
    assert re.search(rf"^\[2@[^\]]+\] {message}", ended.err, re.MULTILINE), ended.text
    fault_at = float(re.search(r"fault at ([\d.]+)", ended.out)[1])
    assert ended.ended_at - fault_at < SOON_SEC
    labeled = [line for line in ended.err.splitlines() if line.startswith("[2@")]
    assert ("Traceback" in "".join(labeled)) == ("sys" not in message)


# One rank leaves its loop, or a step, while the others go on.
PARTING = """
import sys, time, torch, kaitian_mpi

is_open, parts = sys.argv[1] == "open", kaitian_mpi.init().rank == 1
model = torch.nn.Linear(2, 1)
task = kaitian_mpi.Task(
    model=model, data=torch.ones(36, 2), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loss=None if is_open else lambda model, batch: model(batch).mean(),
)
with kaitian_mpi.Training(task, global_batch_size=6, epochs=2, balance="off") as training:
    for step in training.batches() if is_open else training:
        if training.steps_done == 3 and parts:
            print(f"fault at {time.time()}", flush=True)
            if sys.argv[2] == "continue":
                continue
            break
        if is_open:
            training.backward(training.model(step).mean())
            training.step()
"""


@pytest.mark.parametrize(
    ("options", "form", "leaves", "message"),
    [
        (
            (),
            "closed",
            "break",
            "3: the next step on ranks 0, 2, the end of the training on ra",
        ),
        pytest.param(
            SURVIVING,
            "open",
            "break",
            "3: backward() on ranks 0, 2, the end of the training on ra",
            marks=pytest.mark.thorough,
        ),
        ((), "open", "continue", "for each batch before what comes next (rank 1, step 4)"),
    ],
)
def test_ranks_that_part_are_named_and_end(mpirun, options, form, leaves, message):
    command = (*options, PYTHON, "script.py", form, leaves)
    ended = mpirun(3, *command, code=2, script=PARTING)
    assert ended.text.count("error: ") == 1, ended.text
    assert message in ended.err
    assert "Traceback" not in ended.text
    assert ended.ended_at - float(re.search(r"fault at ([\d.]+)", ended.out)[1]) < SOON_SEC


def test_a_rank_that_ends_before_mpi_is_named_and_ends_the_job(tmp_path):
    """The others wait for it in MPI_Init, and Open MPI's mpirun says nothing of it.

    They wait for twenty seconds, so the jobs with and without fault tolerance do so at once.
    """
    script = tmp_path / "early.py"
    script.write_text(
        "import os, sys\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    sys.exit(int(sys.argv[1]))\n"
        "import kaitian_mpi\n"
        "kaitian_mpi.init()\n"
    )
    started_at = time.time()
    started = [
        start("mpirun", "-np", "3", *options, PYTHON, str(script), code, cwd=tmp_path)
        for options, code in (((), "0"), (SURVIVING, "2"))
    ]
    for job in started:
        ended = finish(job, started_at, code=None)
        assert ended.code != 0
        assert "rank 1 of this host ended before MPI started; see what it printed" in ended.err


@pytest.mark.any_mpi
def test_ranks_do_not_outlive_a_killed_mpirun(tmp_path):
    command = "kaitian-train --model planted:Slow --balance off --log-interval 0".split()
    with Job(2, *command, cwd=tmp_path, survives=False) as job:
        job.wait_for("step 1/")
        ranks = job.rank_pids()
        assert len(ranks) == 2
        job.process.kill()
        assert_gone(ranks.values(), SOON_SEC)
