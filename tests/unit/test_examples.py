"""The documentation matches the examples."""

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs/scripts.md").read_text()


def test_the_documented_diff_matches_the_two_scripts():
    before, after = (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("train_before.py", "train_after.py")
    )
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    shown = PAGE.partition("```diff\n")[2].partition("\n```\n")[0]
    assert shown.splitlines() == lines


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_page_and_the_docstring_show_the_command(path):
    name = f"examples.{path.stem}:" if path.stem == "own_model" else f"examples/{path.name}"
    docstring = path.read_text().split('"""')[1]
    for text in (PAGE, docstring):
        commands = [line for line in text.splitlines() if name in line]
        assert any("mpirun -np" in line or "torchrun" in line for line in commands)
