"""Real commands in subprocesses."""

import pytest
from jobs import run_ranks
from shared.emulated_hosts import EmulatedHosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with EmulatedHosts(tmp_path_factory.mktemp("hosts"), [2, 1]) as hosts:
        yield hosts


@pytest.fixture
def mpirun(tmp_path):
    """Run a command under mpirun in an empty folder, with a `script.py`; see `run_ranks`."""

    def run(ranks, *command, script="", **options):
        if script:
            (tmp_path / "script.py").write_text(script)
        return run_ranks(ranks, *command, cwd=tmp_path, **options)

    return run
