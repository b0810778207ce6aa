"""The documented torch and Python versions, and the scripts that select another one."""

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


def test_documented_torch_releases_match_the_package_metadata():
    major, minor = release(BEYOND)
    assert f"torch {OLDEST} to {major}.{minor - 1}" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs/install.md").read_text()
    assert f"torch {OLDEST} to {major}.{minor - 1} and Python" in page
    assert f"Every suite passes with torch {PINNED} on Python" in page
    tested = re.search(r"passed with torch ([\d., and]+), and on", page)[1]
    for each in (PINNED, *re.findall(r"[\d.]+\d", tested)):
        assert release(OLDEST) <= release(each) < release(BEYOND)


def test_documented_python_versions_match_the_classifiers():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    for page in ("README.md", "docs/install.md"):
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / page).read_text()


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


def test_ci_matrix_covers_every_python_and_the_oldest_and_newest_torch():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    (job,) = workflow["jobs"].values()
    matrix = {(each["torch"], each["python"]) for each in job["strategy"]["matrix"]["include"]}
    assert {(PINNED, python) for python in PYTHONS} <= matrix
    minors = {release(torch)[:2] for torch, python in matrix if python == PYTHONS[0]}
    major, minor = release(BEYOND)
    assert {release(OLDEST)[:2], (major, minor - 1)} <= minors
    assert job["steps"][-1]["run"].endswith('.ci/run --torch "$TORCH" --python "$PYTHON"')
    assert (ROOT / ".ci/run").read_text().endswith('\nexec bin/test "$@"\n')


def test_ci_has_read_permission_only_and_pins_its_actions():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        for step in job["steps"]:
            assert (
                re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step.get("uses", "")) or "run" in step
            )
            # Untrusted event data must not be part of a shell command.
            assert "${{" not in step.get("run", "")


def test_pre_commit_hooks_need_no_active_venv():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)
