"""The documented torch and Python versions, and examples."""

import difflib
import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


CONSTRAINTS = (ROOT / ".ci/constraints.txt").read_text()
PINNED = re.search(r"^torch==(.*)$", CONSTRAINTS, re.M)[1]
OLDEST, BEYOND = re.search(r"'torch>=([\d.]+),<([\d.]+)'", str(PROJECT["dependencies"])).groups()
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "3." in line]


def release(text):
    return tuple(int(part) for part in text.split("."))


def test_documented_releases_match_the_package_metadata():
    major, minor = release(BEYOND)
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
    assert f"torch {OLDEST} to {major}.{minor - 1}" in readme
    assert f"torch {OLDEST} to {major}.{minor - 1} and Python" in page
    assert f"Every suite passes with torch {PINNED} on Python" in page
    tested = re.search(r"passed with torch ([\d., and]+), and on", page)[1]
    for each in (PINNED, *re.findall(r"[\d.]+\d", tested)):
        assert release(OLDEST) <= release(each) < release(BEYOND)
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    for text in (readme, page):
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in text


def test_pinned_packages_install_on_the_first_release_of_the_oldest_python():
    """Debian's Python 3.11.2 cannot install a package that requires 3.11.5."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pinned = {canonicalize_name(pin) for pin in re.findall(r"^([\w.-]+)==", CONSTRAINTS, re.M)}
    requires = {
        canonicalize_name(each.name): each.metadata.get("Requires-Python") or ""
        for each in metadata.distributions()
        if canonicalize_name(each.name) in pinned
    }
    assert {"torch", "ruff", "pytest"} <= requires.keys()
    assert [name for name in requires if oldest not in SpecifierSet(requires[name])] == []


@pytest.mark.parametrize(
    ("command", "settings", "why"),
    [
        ("bin/test --torch", {}, "usage: bin/test"),
        ("bin/test 2.8.0", {}, "usage: bin/test"),
        ("bin/test --torch ../2.8", {}, "give one such as 2.8.0"),
        ("bin/test --python 3.1", {}, "no Python 3.11 or newer at python3.1;"),
        ("bin/setup", {"KAITIAN_PYTHON": "/nowhere/python"}, "newer at /nowhere/python;"),
    ],
)
def test_an_invalid_version_is_rejected_before_anything_is_created(command, settings, why):
    before = sorted(ROOT.glob(".venv*"))
    result = subprocess.run(
        command.split(), cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert why in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert sorted(ROOT.glob(".venv*")) == before


def test_ci_covers_every_python_and_the_oldest_and_newest_torch_and_may_only_read():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    (job,) = workflow["jobs"].values()
    matrix = {(each["torch"], each["python"]) for each in job["strategy"]["matrix"]["include"]}
    assert {(PINNED, python) for python in PYTHONS} <= matrix
    minors = {release(torch)[:2] for torch, python in matrix if python == PYTHONS[0]}
    major, minor = release(BEYOND)
    assert {release(OLDEST)[:2], (major, minor - 1)} <= minors
    assert job["steps"][-1]["run"].endswith('.ci/run --torch "$TORCH" --python "$PYTHON"')
    assert (ROOT / ".ci/run").read_text().endswith('\nexec bin/test "$@"\n')
    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in job
    for step in job["steps"]:
        pinned = re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step.get("uses", ""))
        assert pinned or "run" in step
        assert "${{" not in step.get("run", "")  # no command has parts of untrusted event data
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)  # without an active one


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
