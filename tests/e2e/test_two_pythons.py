"""Jobs whose hosts have different releases of Python or torch.

`KAITIAN_TEST_OTHER_PYTHON` is the interpreter of a second environment that has this package; see
CONTRIBUTING.md.
"""

import os
import platform
import subprocess

import jobs
import pytest
import torch
from shared.emulated_hosts import reason_to_skip

OTHER = os.environ.get("KAITIAN_TEST_OTHER_PYTHON", "")
WHY_NOT = reason_to_skip() if OTHER else "KAITIAN_TEST_OTHER_PYTHON names no other environment"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

TRAIN = (
    f"{jobs.SCRIPTS}/kaitian-train",
    *"--check-every 1 --global-batch-size 48".split(),
    *jobs.EVEN,
)
ASK = "import platform, torch, kaitian_mpi; print(platform.python_version(), torch.__version__)"


OURS = {"Python": platform.python_version(), "torch": torch.__version__}


@pytest.fixture(scope="module")
def other():
    """The releases of the other environment that are not ours."""
    asked = subprocess.run([OTHER, "-c", ASK], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    releases = dict(zip(OURS, asked.stdout.split(), strict=True))
    unlike = {name: release for name, release in releases.items() if release != OURS[name]}
    assert unlike
    return unlike


def check_shown(other, text, ours_first=True):
    """Check that a job of two ranks in one environment and one in the other names both releases."""
    for name, release in other.items():
        first, second = (OURS[name], release) if ours_first else (release, OURS[name])
        assert f"{name}: {first} on ranks 0, 1, {second} on rank 2" in text
    assert "differ from the others'" not in text


def start_job(hosts, folder, *command, pythons):
    """Start a job of three ranks, two on the first host and one on the second.

    `pythons`: the interpreter of each host.
    """
    folder.mkdir(exist_ok=True)
    tables = [f'["{hosts.address(n)}"]\npython = "{path}"\n' for n, path in enumerate(pythons, 1)]
    (folder / "env.toml").write_text("".join(tables))
    env = (jobs.PYTHON, "-m", "kaitian_mpi.cli.env", "env.toml")
    return jobs.HostsJob(hosts, *env, *"mpirun -np 3".split(), *command, cwd=folder, fresh=True)


def run_job(hosts, folder, *command, pythons):
    with start_job(hosts, folder, *command, pythons=pythons) as job:
        return job.finish()


@pytest.mark.parametrize("is_first", [True, False])
def test_they_train_to_the_weights_of_one_environment(hosts, other, tmp_path, is_first):
    """`is_first`: whether our Python is that of the first host, where rank 0 writes the files."""
    first, second = (jobs.PYTHON, OTHER) if is_first else (OTHER, jobs.PYTHON)
    command = (*TRAIN, *"--model mobilenetv2 --max-steps 4".split())
    alike, mixed = tmp_path / "alike", tmp_path / "mixed"
    one = run_job(hosts, alike, *command, pythons=(first, first))
    both = run_job(hosts, mixed, *command, pythons=(first, second))
    assert "Python: " not in one.text
    check_shown(other, both.text, is_first)
    # Releases of torch may round differently.
    most = 1e-3 if "torch" in other else 0
    assert jobs.largest_difference(jobs.weights_in(mixed), jobs.weights_in(alike)) <= most


@pytest.mark.usefixtures("other")
def test_each_takes_over_from_the_other(hosts, tmp_path):
    """The spare has the other Python, and continues alone; then ours resumes from what it saved."""
    train = (*TRAIN, *"--model planted:Exact".split())
    whole, cut, resumed = tmp_path / "whole", tmp_path / "cut", tmp_path / "resumed"
    run_job(hosts, whole, *train, "--epochs", "2", pythons=(jobs.PYTHON, jobs.PYTHON))
    spare = "--epochs 2 --spares 1 --checkpoint-every 10".split()
    with start_job(hosts, cut, *train, *spare, pythons=(jobs.PYTHON, OTHER)) as job:
        for lost in (1, 0):
            job.wait_for(r"\| step \d+/")
            job.wait_for(r"\| step \d+/")
            job.kill(lost)
            job.wait_for(rf"rank {lost} .* lost")
        job.finish()
    summary = jobs.summary_of(cut)
    assert summary["finished"] is True
    assert summary["ranks"] == [2]
    assert jobs.largest_difference(jobs.weights_in(cut), jobs.weights_in(whole)) < 1e-9
    more = ("--epochs", "3", "--resume", str(jobs.newest_checkpoint(cut)))
    ended = run_job(hosts, resumed, *train, *more, pythons=(jobs.PYTHON, jobs.PYTHON))
    assert f"resuming from step {summary['steps']} " in ended.text
