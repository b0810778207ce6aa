"""Layouts shard, pipeline and auto on accelerators: the checks of `layouts.py` and `capped.py`."""

import re
from pathlib import Path

import pytest
from choices import by_default
from jobs import PYTHON, SURVIVING, run_ranks
from shared import stand_in

HERE = Path(__file__).parent
TEXT = (HERE / "layouts.py").read_text().partition("SECTIONS: ")[2]
SECTIONS = {
    name: re.findall(r"\b(\w+)(?=,|\])", checks)
    for name, checks in re.findall(r'"(\w+)": \[(.*?)\],', TEXT, re.DOTALL)
}
CHECKS = [(name, check) for name, checks in SECTIONS.items() for check in checks]
ACCELERATORS = {"nccl": 2, "loss": 2, "mixed": 1}
pytestmark = [stand_in.needs_accelerator]
if stand_in.KIND == stand_in.STAND_IN:
    pytestmark.append(pytest.mark.device_in_python)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Return what the checks of a section have found, by name; one launch for all."""
    known = {}

    def launch(section):
        if section not in known:
            accelerators = ACCELERATORS[section]
            (_, devices) = stand_in.devices(accelerators, 2 - accelerators)
            start = [] if accelerators > stand_in.COUNT else [PYTHON]
            words = [*start, HERE / "layouts.py", section, "--devices", devices]
            command = stand_in.command(accelerators, *words)
            options = {"cwd": tmp_path_factory.mktemp(section), **stand_in.environment()}
            options |= {"fresh": stand_in.IS_FRESH, "code": None}
            known[section] = run_ranks(2, *SURVIVING, *command, **options)
        return known[section]

    return launch


@pytest.mark.parametrize(("section", "check"), CHECKS)
def test_layouts(launched, section, check):
    if section == "loss" and stand_in.KIND == stand_in.STAND_IN:
        pytest.skip("garbage of a broken exchange is taken for values")
    ended = launched(section)
    verdicts = dict(reversed(re.findall(r"^(\w+): (.*)", ended.out, re.MULTILINE)))  # first counts
    assert check in verdicts, ended.text
    if verdicts[check].startswith("skipped"):
        pytest.skip(verdicts[check].removeprefix("skipped, "))
    assert verdicts[check].startswith("ok"), ended.text


# On the stand-in, tests/e2e/test_large_models.py has them as well.
FEW = [] if stand_in.KIND == stand_in.STAND_IN else ["shard", "pipeline", "auto"]


@pytest.mark.parametrize("layout", by_default(["shard", "pipeline", "auto"], FEW))
def test_what_fits_no_rank_trains_within_the_memory(tmp_path, layout):
    words = [PYTHON, HERE / "capped.py", "--layout", layout, *stand_in.devices(1, 1)]
    if stand_in.KIND == stand_in.STAND_IN:
        words += "--limit 0.15 --state 0.1 --width 256".split()
    ended = run_ranks(
        2, *stand_in.command(1, *words), cwd=tmp_path, fresh=stand_in.IS_FRESH, code=None,
        **stand_in.environment(),
    )  # fmt: skip
    verdict = re.search(rf"^capped_{layout}_fp32: (.*)", ended.out, re.MULTILINE)
    assert verdict is not None, ended.text
    if verdict[1].startswith("skipped"):
        pytest.skip(verdict[1].removeprefix("skipped, "))
    assert verdict[1].startswith("ok"), ended.text
