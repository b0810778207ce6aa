"""Records how long each test takes, for the list at the end of `bin/test`."""

import gc
import os
from pathlib import Path

import pytest

from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.mpi_libraries import launched_by

_FILE = os.environ.get("KAITIAN_TEST_TIMES")
_LAUNCH = read_launch(os.environ)
_MIN_SEC = 0.1


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded by now stays: each collection of garbage would look through it


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _FILE and _LAUNCH.world_rank == 0 and report.duration >= _MIN_SEC:
        where = report.nodeid + (f", {_LAUNCH.world_size} ranks" if launched_by(os.environ) else "")
        with Path(_FILE).open("a") as file:
            file.write(f"{report.duration:8.1f}  {where} ({report.when})\n")
