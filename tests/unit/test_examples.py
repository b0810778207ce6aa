"""The documentation matches the examples."""

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs/scripts.md").read_text()
OWN_TRAINING = (ROOT / "docs/your-own-training.md").read_text()
MAX_NEW_LINES = 10


def lines_before_and_after():
    return (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("train_before.py", "own_loop.py")
    )


def test_the_documented_diff_matches_the_two_scripts():
    lines = list(difflib.unified_diff(*lines_before_and_after(), n=1, lineterm=""))[2:]
    shown = OWN_TRAINING.partition("```diff\n")[2].partition("\n```\n")[0]
    assert shown.splitlines() == lines


def test_a_stock_script_needs_few_new_lines():
    """Counts lines of code, whatever their indentation."""
    before, after = (
        [line.strip() for line in lines if line.strip() and "examples/" not in line]
        for lines in lines_before_and_after()
    )
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(new) <= MAX_NEW_LINES, new
    assert not any("batch_sizes" in line for line in after)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_page_and_the_docstring_show_the_command(path):
    name = f"examples.{path.stem}:" if path.stem == "own_model" else f"examples/{path.name}"
    docstring = path.read_text().split('"""')[1]
    for text in (PAGE, docstring):
        commands = [line for line in text.splitlines() if name in line]
        assert any("mpirun -np" in line or "torchrun" in line for line in commands)
