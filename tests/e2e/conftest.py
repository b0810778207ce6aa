"""Real commands in subprocesses."""

import pytest
from jobs import run_ranks


@pytest.fixture
def mpirun(tmp_path):
    """Run a command under mpirun in an empty folder; see `run_ranks`."""
    return lambda ranks, *command, **options: run_ranks(ranks, *command, cwd=tmp_path, **options)
