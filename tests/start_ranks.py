"""Starts pytest under mpirun if the selected tests are of a suite whose tests run on several ranks.

Which number of ranks follows from the selected tests: the one on which most of them run. A suite's
default counts if several do; `--ranks N`, or else KAITIAN_TEST_RANKS, sets another. Under mpirun,
nothing of this happens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from shared.launch import ENVIRONMENT

from kaitian_mpi.runtime.launcher import find_launch

DEFAULT_RANKS = {"mpi": 3, "vendor": 4}
_COUNTS = (1, 2, 3, 4)
_TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "the number of ranks that tests/mpi or tests/vendor starts with, without mpirun"
    parser.addoption("--ranks", type=int, default=os.environ.get("KAITIAN_TEST_RANKS"), help=about)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Replace this process by mpirun, which passes the output, signals and the exit code on."""
    suites = {_suite_of(item) for item in session.items}
    if find_launch(os.environ) or session.config.option.collectonly or not any(suites):
        return
    if len(suites) > 1:
        raise pytest.UsageError("tests/mpi and tests/vendor each require a pytest of their own")
    (suite,) = suites
    ranks = session.config.option.ranks or ranks_for(session.items, DEFAULT_RANKS[suite])
    arguments = ["-m", "pytest", "-s", *session.config.invocation_params.args]
    command = ["mpirun", "-np", str(ranks), sys.executable, *arguments]
    session.config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    print(f"+ mpirun -np {ranks} python {' '.join(arguments)}", flush=True)
    os.execvpe(command[0], command, ENVIRONMENT)


def _suite_of(item: pytest.Item) -> str | None:
    """Return the suite of a test that runs on several ranks; None for another test."""
    folder = item.path.relative_to(_TESTS).parts[0] if item.path.is_relative_to(_TESTS) else ""
    return folder if folder in DEFAULT_RANKS else None


def ranks_for(items: Sequence[pytest.Item], default: int) -> int:
    """Return the number of ranks on which most of the tests run; the default if it is one."""
    runs = {count: sum(why_not_on(count, item) is None for item in items) for count in _COUNTS}
    return max(_COUNTS, key=lambda count: (runs[count], count == default))


def why_not_on(ranks: int, item: pytest.Item) -> str | None:
    """Return why a test does not run on so many ranks, by its markers; None if it does."""
    for marker in item.iter_markers("ranks"):
        if ranks < marker.args[0]:
            return f"needs at least {marker.args[0]} ranks"
    sizes = item.get_closest_marker("sizes")
    if sizes and ranks not in sizes.args:
        return f"runs on {' or '.join(map(str, sizes.args))} ranks"
    return None


def is_thorough(ranks: int, item: pytest.Item) -> bool:
    """Return whether only `bin/test --all` runs a test on so many ranks, by its markers."""
    marked = item.iter_markers("thorough")
    return any(not marker.args or ranks in marker.args for marker in marked)
