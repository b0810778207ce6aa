"""The documented torch and Python versions, the examples, and the files for clusters."""

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.supervise.mpirun_command import parse_launcher

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


CONSTRAINTS = (ROOT / ".ci/constraints.txt").read_text()
PINNED = re.search(r"^torch==(.*)$", CONSTRAINTS, re.M)[1]
OLDEST, BEYOND = re.search(r"'torch>=([\d.]+),<([\d.]+)'", str(PROJECT["dependencies"])).groups()
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "3." in line]


def release(text):
    return tuple(int(part) for part in text.split("."))


def test_documented_and_pinned_releases_match_the_metadata_and_ci_covers_them():
    major, minor = release(BEYOND)
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
    assert f"torch {OLDEST} to {major}.{minor - 1}" in readme
    assert f"torch {OLDEST} to {major}.{minor - 1} and Python" in page
    assert f"Every suite passes with torch {PINNED} on Python" in page
    tested = re.search(r"passed with torch ([\d., and]+), and on", page)[1]
    for version in (PINNED, *re.findall(r"[\d.]+\d", tested)):
        assert release(OLDEST) <= release(version) < release(BEYOND)
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    for text in (readme, page):
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in text
    # Debian's Python 3.11.2 cannot install a package that requires 3.11.5.
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pinned = {canonicalize_name(pin) for pin in re.findall(r"^([\w.-]+)==", CONSTRAINTS, re.M)}
    requires = {
        canonicalize_name(each.name): each.metadata.get("Requires-Python") or ""
        for each in metadata.distributions()
        if canonicalize_name(each.name) in pinned
    }
    assert {"torch", "ruff", "pytest"} <= requires.keys()
    assert [name for name in requires if oldest not in SpecifierSet(requires[name])] == []
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    (job,) = workflow["jobs"].values()
    entries = job["strategy"]["matrix"]["include"]
    matrix = {(entry["torch"], entry["python"]) for entry in entries}
    assert {(PINNED, python) for python in PYTHONS} <= matrix
    minors = {release(torch)[:2] for torch, python in matrix if python == PYTHONS[0]}
    major, minor = release(BEYOND)
    assert {release(OLDEST)[:2], (major, minor - 1)} <= minors
    assert job["steps"][-1]["run"].endswith('.ci/run $ALL --torch "$TORCH" --python "$PYTHON"')
    assert (ROOT / ".ci/run").read_text().endswith('\nexec bin/test "$@"\n')


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
    assert (len(result.stderr.splitlines()), sorted(ROOT.glob(".venv*"))) == (1, before)


NEWER = """#!/bin/sh
exec {python} -c 'import sys; sys.version_info = (3, 14, 0); exec(sys.argv[1])' "$2"
"""


def test_setup_takes_no_python_by_itself_that_the_suites_have_not_passed_with(tmp_path):
    for version in ("3", *(f"3.{minor}" for minor in range(11, 15))):
        stub = tmp_path / f"python{version}"
        stub.write_text(NEWER.format(python=sys.executable))
        stub.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KAITIAN_TORCH": "0"}
    env.pop("KAITIAN_PYTHON", None)
    done = subprocess.run([ROOT / "bin/setup"], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"no Python {PYTHONS[0]} to {PYTHONS[-1]} is installed; install one" in done.stderr


STUB = """#!/bin/sh
case "$*" in
    "-c import sys; print"*) echo 3.11 ;;
    "-c "*) ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *) echo "installs $*" ;;
esac
"""


def test_setup_installs_what_the_demo_needs_and_keeps_what_the_tests_need(tmp_path):
    for name in ("bin/setup", "pyproject.toml", ".ci/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def setup(**settings):
        # bin/test may have set them.
        set_outside = {"KAITIAN_TORCH", "KAITIAN_MPI", "KAITIAN_EXTRAS"}
        env = {name: os.environ[name] for name in os.environ.keys() - set_outside}
        env |= {"KAITIAN_PYTHON": str(stub)} | settings
        done = subprocess.run([tmp_path / "bin/setup"], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = setup()
    assert first.index("downloading torch and what [mpi,demo,report] brings") < first.index(
        "--editable .[mpi,demo,report]"
    )
    assert "about 0.3 GB" in first
    compiled = "installs -m compileall -qq -j 0 -x"
    assert first.index("--no-compile") < first.index(compiled)
    assert setup() == ""
    assert "--editable .[dev]" in setup(KAITIAN_EXTRAS="dev")
    assert setup() == ""  # it has all that the demo needs
    (tmp_path / "pyproject.toml").write_text("# other requirements")
    assert "--editable .[dev]" in setup()
    for script in ("bin/test", "bin/docs", ".ci/run"):
        assert "KAITIAN_EXTRAS=dev" in (ROOT / script).read_text()


OWN_TRAINING = (ROOT / "docs/your-own-training.md").read_text()
MAX_NEW_LINES = 10


def lines_before_and_after():
    return (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("train_before.py", "own_loop.py")
    )


def test_the_documented_diff_matches_the_two_scripts_and_has_few_new_lines():
    lines = list(difflib.unified_diff(*lines_before_and_after(), n=1, lineterm=""))[2:]
    shown = OWN_TRAINING.partition("```diff\n")[2].partition("\n```\n")[0]
    assert shown.splitlines() == lines
    # Counts lines of code, whatever their indentation.
    before, after = (
        [line.strip() for line in lines if line.strip() and "examples/" not in line]
        for lines in lines_before_and_after()
    )
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(new) <= MAX_NEW_LINES, new
    assert not any("batch_sizes" in line for line in after)


FOLDER = ROOT / "examples/cluster"
SCRIPTS = sorted([*FOLDER.glob("*.sbatch"), *FOLDER.glob("*.sh")])
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
MPIRUN_OPTIONS = {"hostfile", "with-ft", "bind-to", "x"}


def launch_scripts():
    """Return all shell scripts by their names, those in manifests too."""
    texts = {path.name: path.read_text() for path in SCRIPTS}
    for path in MANIFESTS:
        job = next(yaml.safe_load_all(path.read_text()))
        pod = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["bash", "-c"]
        (texts[path.name],) = container["args"]
    return texts


@pytest.mark.parametrize("name", launch_scripts())
def test_shells_accept_the_scripts_and_commands_the_flags(name):
    script = launch_scripts()[name]
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = re.sub(r"\\\n\s*", "", script).splitlines()
    (line,) = (x for x in lines if "kaitian-train" in x and not x.lstrip().startswith("#"))
    words = shlex.split(line.replace("${arguments[@]}", "$@").rstrip("&)"))
    at = next(index for index, word in enumerate(words) if word.endswith("kaitian-train"))
    parse_config("kaitian-train", [word for word in words[at + 1 :] if word != "$@"])
    if "mpirun" in words[:at]:
        launcher = parse_launcher(words)
        assert {part.name for part in launcher.parts if part.name} <= MPIRUN_OPTIONS
        assert launcher.arguments[0] == words[at]


def test_unlike_pods_belong_together_and_images_copy_what_exists():
    contents = yaml.safe_load_all((FOLDER / "mpijob-unlike.yaml").read_text())
    by_kind = {content["kind"]: content for content in contents}
    pods = by_kind["StatefulSet"]
    names = {kind: content["metadata"]["name"] for kind, content in by_kind.items()}
    template, service = pods["spec"]["template"], by_kind["Service"]["spec"]["selector"]
    assert template["metadata"]["labels"] == pods["spec"]["selector"]["matchLabels"] == service
    assert pods["spec"]["serviceName"] == names["Service"]
    hosts = [line.split()[0] for line in by_kind["ConfigMap"]["data"]["hostfile"].splitlines()]
    pod = f"{names['StatefulSet']}-{{}}.{names['Service']}"
    assert hosts == [*map(pod.format, range(pods["spec"]["replicas"]))]
    lines = re.sub(r"\\\n", "", (FOLDER / "Dockerfile").read_text()).splitlines()
    copied = [source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]]
    definition = (FOLDER / "apptainer.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n((?: .*\n|\n)*)", definition, re.M))
    copied += [line.split()[0] for line in sections["files"].splitlines() if line.strip()]
    assert set(copied) == {"pyproject.toml", "README.md", "LICENSE", "kaitian_mpi"}
    assert all((ROOT / source).exists() for source in copied)
    scripts = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN")]
    for script in [*scripts, *(sections[name] for name in ("post", "environment", "runscript"))]:
        done = subprocess.run(["sh", "-n"], input=script, text=True, check=False)
        assert done.returncode == 0, script
