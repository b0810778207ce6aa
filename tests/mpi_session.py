"""What the suites that run inside one mpirun share: `from mpi_session import *` in a conftest.

Without mpirun, they are only collected, and started under it; see `start_ranks.py`.

Every test runs on every rank. The first failure on any rank ends the session with that rank's
traceback, because the other ranks would wait for it forever.
"""

from __future__ import annotations

import os

import collective_cases  # noqa: F401  # which gives earlier releases of torch the tests' names
import mpi4py
import pytest
import torch.distributed as dist
from choices import by_default
from start_ranks import why_not_on

from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS, BY_HOST
from kaitian_mpi.runtime.abort import abort_job, write_labeled
from kaitian_mpi.runtime.launcher import find_launch, read_launch
from kaitian_mpi.runtime.watchdog import watch_end

LAUNCH = read_launch(os.environ)
if find_launch(os.environ) is None:
    mpi4py.rc.initialize = False  # this process only collects the tests; see `start_ranks`


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if LAUNCH.world_rank != 0:  # one rank speaks; a failure is printed by whoever has it
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, in `bin/test`, what runs on other numbers of ranks: a skip takes longer."""
    if "KAITIAN_TEST_THOROUGH" in os.environ and find_launch(os.environ):
        others = [item for item in items if why_not_on(LAUNCH.world_size, item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if not why_not_on(LAUNCH.world_size, item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := why_not_on(LAUNCH.world_size, item):
        pytest.skip(reason)


def pytest_runtest_teardown() -> None:
    """Let the tests that follow last: a test of steps alone leaves the last one's limit behind."""
    watch_end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed:
        item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
        write_labeled(f"{item.nodeid} failed:\n{report.longreprtext}")
        abort_job(1)
    return report


@pytest.fixture(params=ALGORITHMS)
def algorithm(request, world):
    """An algorithm of allreduce between kinds, unless the ranks do the same by an earlier one."""
    use_algorithm(request.param)
    yield request.param
    dist.group.WORLD.host.algorithm = "flat"


def mostly_by_leader(*ranks: int) -> pytest.MarkDecorator:
    """Mark a test with other algorithms `thorough` on these numbers of ranks, or on any."""
    algorithms = by_default(ALGORITHMS, ["leader"], ranks)
    return pytest.mark.parametrize("algorithm", algorithms, indirect=True)


def use_algorithm(name: str) -> None:
    group = dist.group.WORLD
    comms = group.comms.by_host if name in BY_HOST else group.comms
    if (group.has_one_group and name != "flat") or ("striped" in name and comms.lanes == 1):
        pytest.skip("it is the same as another")
    group.host.algorithm = name


def pytest_sessionfinish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
