"""The pages on one's own training: their scripts and commands run as they stand there."""

import json
import re
import shlex
from pathlib import Path

import pytest
from choices import by_default
from jobs import IS_OPEN_MPI, PYTHON, SURVIVING, run_alone, run_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-own-training.md").read_text()
REFERENCE = (ROOT / "docs/task.md").read_text()
PARTS = """
import torch
from torch import nn

torch.manual_seed(0)
# Samples that take time: without them a rank that is slow for a moment is not worth keeping.
model = nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 256))
dataset = list(torch.randn(512, 8))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def compute_loss(model, batch):
    return model(batch).square().mean()


"""


def blocks(page, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    return [content for name, content in found if name == language]


COMMANDS = [line for block in blocks(PAGE, "") for line in block.splitlines()]
OF_EXAMPLES = [command for command in COMMANDS if "examples/" in command]
OF_THE_PAGE = [command for command in COMMANDS if "train.py" in command.split()]


def run(command, folder):
    """Run a command that starts mpirun, by an mpirun whose ranks are forked."""
    program, _, ranks, *arguments = shlex.split(command)
    survives = SURVIVING if IS_OPEN_MPI else ()
    return run_ranks(ranks, *survives, program, *arguments, cwd=folder).out


def test_all_commands_of_the_page_are_run_here():
    assert sorted(OF_EXAMPLES + OF_THE_PAGE) == sorted(COMMANDS)
    assert COMMANDS


@pytest.mark.parametrize(
    "command", by_default(OF_EXAMPLES, [line for line in OF_EXAMPLES if "_before" in line])
)
def test_both_training_examples_learn_the_digits(tmp_path, command):
    """The stock script runs unmodified under kaitian-run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    out = run(command, tmp_path)
    assert out.count("accuracy") == 1
    assert float(out.partition("held-out accuracy")[2].split()[0]) > 0.88


@pytest.mark.any_mpi
def test_the_script_of_the_page_trains_and_resumes(tmp_path):
    scripts = blocks(PAGE, "python") + blocks(REFERENCE, "python")
    (tmp_path / "train.py").write_text("\n".join(scripts))
    (command,) = OF_THE_PAGE
    out = run(command, tmp_path)
    figures = [float(out.partition(name)[2].split()[0]) for name in ("\nheld-out", "average loss")]
    for name in ("closed", "open"):
        assert json.loads((tmp_path / "runs" / name / "summary.json").read_text())["finished"]
    assert '"perplexity"' in (tmp_path / "runs/closed/metrics.jsonl").read_text()

    again = run(command, tmp_path)
    assert "| step" not in again  # nothing is trained
    assert [
        float(again.partition(name)[2].split()[0]) for name in ("\nheld-out", "average loss")
    ] == figures


def test_the_script_of_the_readme_trains(mpirun, tmp_path):
    (script,) = blocks((ROOT / "README.md").read_text(), "python")
    (tmp_path / "script.py").write_text(PARTS + script)
    ended = mpirun(2, PYTHON, "script.py")
    # A rank may be excluded, if another program slows it down in the benchmark.
    assert re.search(r"^24 \d\.\d+ \[\d+(, \d+)?\]$", ended.out, re.M), ended.text


def test_the_script_with_batch_sizes_by_hand_trains(mpirun):
    *_, script = blocks((ROOT / "docs/scripts.md").read_text(), "python")
    mpirun(2, PYTHON, "script.py", script=script)


def test_the_cell_of_the_page_on_notebooks_trains(tmp_path):
    """As a kernel runs it: alone, without mpirun; a second training may follow in the process."""
    cell = blocks((ROOT / "docs/notebooks.md").read_text(), "python")[0]
    ended = run_alone(PYTHON, "-c", f"{cell}\n{cell}\nprint(len(losses), 'steps')", cwd=tmp_path)
    assert "8 steps" in ended.out
