"""Jobs whose hosts have different releases of Python.

`KAITIAN_TEST_OTHER_PYTHON` is the interpreter of a second environment that has this package; see
docs/install.md.
"""

import os
import platform
import subprocess
import time

import pytest
from emulated_hosts import EmulatedHosts, reason_to_skip
from jobs import (
    EVEN,
    PYTHON,
    SCRIPTS,
    HostsJob,
    largest_difference,
    newest_checkpoint,
    summary_of,
    weights_in,
)

OTHER = os.environ.get("KAITIAN_TEST_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
    pytest.mark.skipif(not OTHER, reason="KAITIAN_TEST_OTHER_PYTHON names no other Python"),
]

RECOVERY_LIMIT_SEC = 60
TRAIN = (f"{SCRIPTS}/kaitian-train", *"--check-every 1 --global-batch-size 48".split(), *EVEN)
ASK = "import platform, torch, kaitian_mpi; print(platform.python_version(), torch.__version__)"


@pytest.fixture(scope="module")
def other_version():
    """The other interpreter's release of Python."""
    asked = subprocess.run([OTHER, "-c", ASK], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    version = asked.stdout.split()[0]
    assert version != platform.python_version()
    return version


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with EmulatedHosts(tmp_path_factory.mktemp("hosts"), [2, 1]) as hosts:
        yield hosts


def start_job(hosts, folder, *command, pythons):
    """Start a job of three ranks, two on the first host and one on the second.

    `pythons`: the interpreter of each host.
    """
    folder.mkdir(exist_ok=True)
    tables = [f'["{hosts.address(n)}"]\npython = "{path}"\n' for n, path in enumerate(pythons, 1)]
    (folder / "env.toml").write_text("".join(tables))
    env = (PYTHON, "-m", "kaitian_mpi.cli.env", "env.toml")
    return HostsJob(hosts, *env, *"mpirun -np 3".split(), *command, cwd=folder, fresh=True)


def run_job(hosts, folder, *command, pythons):
    with start_job(hosts, folder, *command, pythons=pythons) as job:
        return job.finish()


@pytest.mark.parametrize("is_first", [True, False])
def test_they_train_to_the_weights_of_one_python(hosts, other_version, tmp_path, is_first):
    """`is_first`: whether our Python is that of the first host, where rank 0 writes the files."""
    versions = {PYTHON: platform.python_version(), OTHER: other_version}
    first, second = (PYTHON, OTHER) if is_first else (OTHER, PYTHON)
    command = (*TRAIN, *"--model mobilenetv2 --max-steps 4".split())
    alike, mixed = tmp_path / "alike", tmp_path / "mixed"
    one = run_job(hosts, alike, *command, pythons=(first, first))
    both = run_job(hosts, mixed, *command, pythons=(first, second))
    assert "Python: " not in one.text
    assert f"Python: {versions[first]} on ranks 0, 1, {versions[second]} on rank 2" in both.text
    assert "differ from the others'" not in both.text
    assert largest_difference(weights_in(mixed), weights_in(alike)) == 0


@pytest.mark.usefixtures("other_version")
def test_each_takes_over_from_the_other(hosts, tmp_path):
    """The spare has the other Python, and continues alone; then ours resumes from what it saved."""
    train = (*TRAIN, *"--model planted:Exact".split())
    whole, cut, resumed = tmp_path / "whole", tmp_path / "cut", tmp_path / "resumed"
    run_job(hosts, whole, *train, "--epochs", "2", pythons=(PYTHON, PYTHON))
    spare = "--epochs 2 --spares 1 --checkpoint-every 10".split()
    with start_job(hosts, cut, *train, *spare, pythons=(PYTHON, OTHER)) as job:
        for lost in (1, 0):
            job.wait_for(r"\| step \d+/")
            job.wait_for(r"\| step \d+/")
            job.kill(lost)
            killed_at = time.time()
            job.wait_for(rf"rank {lost} .* lost")
            job.wait_for(r"\| step \d+/")
            assert time.time() - killed_at < RECOVERY_LIMIT_SEC
        job.finish()
    summary = summary_of(cut)
    assert summary["finished"] is True
    assert summary["ranks"] == [2]
    assert largest_difference(weights_in(cut), weights_in(whole)) < 1e-9
    more = ("--epochs", "3", "--resume", str(newest_checkpoint(cut)))
    ended = run_job(hosts, resumed, *train, *more, pythons=(PYTHON, PYTHON))
    assert f"resuming from step {summary['steps']} " in ended.text
