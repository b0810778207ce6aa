"""Accelerators and CPUs in one world: `on_ranks.py` with one and with two accelerators."""

import re
from pathlib import Path

import pytest
from choices import by_default
from jobs import PYTHON, run_ranks
from shared import stand_in

SCRIPT = Path(__file__).with_name("on_ranks.py")
CHECKS = re.findall(r"\b(\w+),", SCRIPT.read_text().partition("...] = (")[2])
pytestmark = stand_in.needs_accelerator


@pytest.fixture(scope="module", params=by_default([1, 2], [2]), ids=["one", "two"])
def found(request, tmp_path_factory):
    """What the checks have found, by name; one launch for all."""
    accelerators = request.param
    (_, devices) = stand_in.devices(accelerators, 1)
    start = [] if accelerators > stand_in.COUNT else [PYTHON]
    command = stand_in.command(accelerators, *start, SCRIPT, devices)
    options = {"cwd": tmp_path_factory.mktemp("ranks"), **stand_in.environment()}
    ended = run_ranks(accelerators + 1, *command, fresh=stand_in.IS_FRESH, code=None, **options)
    lines = dict(line.split(": ", 1) for line in ended.out.splitlines() if ": " in line)
    return lines, ended


@pytest.mark.parametrize("check", CHECKS)
def test_on_ranks(found, check):
    lines, ended = found
    # Without what mpirun says in the end, of all that a rank has said.
    assert check in lines, ended.out + ended.err.partition("-" * 74)[0]
    if lines[check].startswith("skipped"):
        pytest.skip(lines[check].removeprefix("skipped, "))
    assert lines[check] == "ok"
