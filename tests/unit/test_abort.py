import os
import subprocess
import sys
import time

import pytest

from kaitian_mpi.runtime.mpi_libraries import MPICH

RANK = """
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.abort import abort_on_error
with abort_on_error("kaitian-train"):
    raise UserError("found a mistake")
"""


@pytest.fixture
def failing_rank():
    """A rank of two that finds a mistake before it has started MPI; the test is its launcher."""
    environ = {**os.environ, **dict(zip(MPICH.rank_variables, "0202", strict=True))}
    process = subprocess.Popen([sys.executable, "-c", RANK], stderr=subprocess.PIPE, env=environ)
    yield process
    process.kill()
    process.communicate()


def test_a_rank_ends_the_job_only_once_its_launcher_has_read_its_message(failing_rank):
    reads_no_output_sec = 1.0
    with pytest.raises(subprocess.TimeoutExpired):
        failing_rank.wait(reads_no_output_sec)
    assert failing_rank.stderr.read() == b"kaitian-train: error: found a mistake\n"
    assert failing_rank.wait(5) == 2


def test_a_rank_whose_launcher_reads_nothing_ends_all_the_same(failing_rank):
    began = time.monotonic()
    assert failing_rank.wait(5) == 2
    assert time.monotonic() - began > 1.5
