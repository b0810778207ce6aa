"""Run inside one mpirun: ``mpirun -np N python -m pytest -s tests/mpi``.

Every test runs on every rank. The world's device kinds are emulated: even ranks are "even", odd
ones "odd". The first failure on any rank ends the session with that rank's traceback, because the
other ranks would wait for it for ever.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import pytest
import torch.distributed as dist

import kaitian_mpi
from kaitian_mpi.mpi.guard import end_job, say_labelled
from kaitian_mpi.mpi.launch import read_launch
from kaitian_mpi.mpi.world import World

_LAUNCH = read_launch(os.environ)
_LONGEST_TEST_SEC = 90


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(least): needs at least so many ranks")
    if _LAUNCH.world_rank != 0:  # one rank speaks; a failure is printed by whoever has it
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115


@pytest.fixture(scope="session")
def world() -> World:
    kinds = ",".join("even" if rank % 2 == 0 else "odd" for rank in range(_LAUNCH.world_size))
    return kaitian_mpi.init(emulate_kinds=kinds)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("ranks"):
        if _LAUNCH.world_size < marker.args[0]:
            pytest.skip(f"needs at least {marker.args[0]} ranks")
    faulthandler.dump_traceback_later(_LONGEST_TEST_SEC, exit=True, file=sys.__stderr__)


def pytest_runtest_teardown() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed:
        item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
        say_labelled(f"{item.nodeid} failed:\n{report.longreprtext}")
        end_job(1)
    return report


def pytest_sessionfinish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
