"""Records how long each test takes, for the list at the end of `bin/test`."""

import gc
import os
from pathlib import Path

import pytest

_FILE = os.environ.get("KAITIAN_TEST_TIMES")
_IS_FIRST_RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
_MIN_SEC = 0.1


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded by now stays: each collection of garbage would look through it


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _FILE and _IS_FIRST_RANK and report.duration >= _MIN_SEC:
        ranks = os.environ.get("OMPI_COMM_WORLD_SIZE")
        where = report.nodeid + (f", {ranks} ranks" if ranks else "")
        with Path(_FILE).open("a") as file:
            file.write(f"{report.duration:8.1f}  {where} ({report.when})\n")
