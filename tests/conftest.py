"""Gives every test the same surroundings, and records how long it takes, for `bin/test`."""

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from start_ranks import *  # noqa: F403
from start_ranks import is_thorough

from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.mpi_libraries import launched_by

_FILE = os.environ.get("KAITIAN_TEST_TIMES")
_LAUNCH = read_launch(os.environ)
_MIN_SEC = 0.1
_GARBAGE_THRESHOLD = 50_000  # objects; with Python's 700, a twentieth of the time goes to looking

# What started the tests may have these ignored or blocked, as a background job of a shell, `nohup`
# and cron do, and processes inherit that.
signal.pthread_sigmask(signal.SIG_SETMASK, ())
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.umask(0o022)


HAS_LINUX = sys.platform == "linux" and hasattr(os, "pidfd_open")  # see tests/without_linux


def pytest_configure(config: pytest.Config) -> None:
    marker = "emulated_device: needs the accelerator of tests/vendor, which a C++ compiler builds"
    config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the `thorough` tests of this number of ranks to `bin/test --all`."""
    if os.environ.get("KAITIAN_TEST_THOROUGH") != "no":  # which bin/test sets otherwise
        return
    ranks = _LAUNCH.world_size
    config.hook.pytest_deselected(items=[item for item in items if is_thorough(ranks, item)])
    items[:] = [item for item in items if not is_thorough(ranks, item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("linux"):
        if not HAS_LINUX:
            pytest.skip(f"needs Linux: {marker.args[0]}")
    if item.get_closest_marker("device_in_python"):
        registration = importlib.import_module("torch.utils.backend_registration")
        if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
            pytest.skip("this torch cannot have a device type in Python")
    if item.get_closest_marker("emulated_device"):
        is_required = os.environ.get("KAITIAN_TEST_COMPILER") == "required"
        if not (is_required or shutil.which(os.environ.get("CXX", "g++"))):
            pytest.skip("the emulated device needs a C++ compiler, such as g++")


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Undo what a command that is called in this process has configured."""
    logger = logging.getLogger("kaitian_mpi")
    before = logger.level, logger.propagate, logging.raiseExceptions
    handlers = list(logger.handlers)
    yield
    level, logger.propagate, logging.raiseExceptions = before
    logger.setLevel(level)
    logger.handlers[:] = handlers


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded by now stays: each collection of garbage would look through it
    gc.set_threshold(_GARBAGE_THRESHOLD, 20, 20)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _FILE and _LAUNCH.world_rank == 0 and report.duration >= _MIN_SEC:
        where = report.nodeid + (f", {_LAUNCH.world_size} ranks" if launched_by(os.environ) else "")
        with Path(_FILE).open("a") as file:
            file.write(f"{report.duration:8.1f}  {where} ({report.when})\n")
