"""The scripts of examples/conversions: they train before and after, and the page counts them."""

import re
import runpy
from pathlib import Path

import pytest
from choices import by_default
from jobs import PYTHON, run_alone

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/conversions"


def test_the_page_shows_the_lines_that_are_counted():
    page = (ROOT / "docs/your-own-training.md").read_text()
    rows = runpy.run_path(str(ROOT / "benchmarks/conversions.py"))["rows"]()
    assert len(rows) == 3
    for row in rows:
        assert row in page, "run: python benchmarks/conversions.py"


SHORT = {
    "mnist": ("--epochs 6", r"accuracy (0\.\d+)", 0.7),
    "gpt": ("--max-iters 50", r"val loss (\d\.\d+)", -3.3),
    "imagenet": ("--samples 1024 --epochs 3", r"(?:Acc@1|held-out Acc@1) (\d+\.\d+)", 50),
}


def check(name, out):
    """Check the last figure; of a loss, its negative."""
    _, pattern, least = SHORT[name]
    last = float(re.findall(pattern, out)[-1])
    assert (last if least > 0 else -last) > least, out


@pytest.mark.thorough  # it shows nothing of this package
@pytest.mark.parametrize("name", SHORT)
def test_a_script_trains_as_it_was_before(tmp_path, name):
    script = FOLDER / f"{name}_before.py"
    check(name, run_alone(PYTHON, str(script), *SHORT[name][0].split(), cwd=tmp_path).out)


@pytest.mark.parametrize("name", by_default(SHORT, ["mnist"]))
def test_a_converted_script_trains_on_two_ranks(mpirun, name):
    check(name, mpirun(2, PYTHON, str(FOLDER / f"{name}.py"), *SHORT[name][0].split()).out)
