"""The README shows what the examples are."""

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
README = (ROOT / "README.md").read_text()


def test_the_readme_shows_the_difference_between_the_two_scripts():
    before, after = (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("train_before.py", "train_after.py")
    )
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    shown = README.partition("```diff\n")[2].partition("\n```\n")[0]
    assert shown.splitlines() == lines


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_readme_and_the_example_itself_tell_how_to_run_it(path):
    name = f"examples.{path.stem}:" if path.stem == "own_model" else f"examples/{path.name}"
    docstring = path.read_text().split('"""')[1]
    for text in (README, docstring):
        commands = [line for line in text.splitlines() if name in line]
        assert any("mpirun -np" in line or "torchrun" in line for line in commands)
