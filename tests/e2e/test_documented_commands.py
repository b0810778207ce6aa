"""The commands of README and docs as they are printed, each in a shell, in a folder of its page.

Trainings are given flags that make them short. `documented.py` says which commands are not run.
"""

import json
import re
import shlex

import numpy as np
import pytest
import torch
from documented import ROOT, documented_commands, pattern_of
from jobs import ENVIRONMENT, PYTHON, SCRIPTS, forked, run_alone
from PIL import Image
from unit.report_runs import make_run

from kaitian_mpi.balance.communication import AllreduceCost, MeasuredAllreduce
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.measurements import MeasuredRank, Measurements
from kaitian_mpi.recipes.models import build_model

SHORT = "--max-steps 1 --benchmark-seconds 0.1 --global-batch-size 8 --no-parity"
COMMANDS = {
    command: page for command, page in documented_commands().items() if pattern_of(command) is None
}
SHORT_ONES = re.compile(
    r"^kaitian-(report --text|plan measured|run -n 2 --backend-override nccl,gloo train)|"
    r"runs/(first|stop|nb)"
)
"""Those that bin/test runs without --all: they take about a second."""
TRAIN_PY = """
import argparse, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
dist.init_process_group("nccl")
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, sampler=DistributedSampler(data), batch_size=4)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), parser.parse_args().lr)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
"""
SCRIPT_PY = """
import torch, torch.distributed as dist

dist.init_process_group("kaitian", init_method="mpi://")
dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
"""
MODULES = {
    "mypackage/__init__.py": "",
    "mypackage/models.py": """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))
""",
    "mypackage/data.py": """
import torch

class Pictures(torch.utils.data.Dataset):
    num_classes = 3

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(3, 2, 2), index % 3

def load():
    return Pictures()
""",
    "mypackage/tasks.py": """
import torch
from torch import nn
from kaitian_mpi import Task

def build(layers: int, lr: float = 1e-3):
    return Task(
        model=nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))),
        data=list(torch.randn(64, 4)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
    )
""",
    "train.py": TRAIN_PY,
    "script.py": SCRIPT_PY,
}
# A command that starts mpirun must be named as what it starts; each rank is forked.
PROGRAM = """#!/bin/sh
case "${{OMPI_COMM_WORLD_RANK-}} $*" in
    " "*-n\\ [0-9]*) exec {python} -c 'import sys
from kaitian_mpi.cli.{module} import main
sys.argv[0] = "{path}"
main()' "$@" ;;
esac
exec {forked} "$@"
"""


def write_pictures(home):
    """Write files in the format of CIFAR-10, of four pictures each, and folders of pictures."""
    for name in ("cifar", "cifar-10-batches-bin"):
        folder = home / "data" / name
        folder.mkdir(parents=True)
        for part in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            rows = np.random.default_rng(0).integers(0, 10, (4, 3073), dtype=np.uint8)
            (folder / f"{part}.bin").write_bytes(rows.tobytes())
    for number in range(12):
        folder = home / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        gray = np.full((40 + number, 50, 3), 20 * number, np.uint8)
        Image.fromarray(gray).save(folder / f"{number}.png")


def write_programs(folder):
    """Write what forks the processes of commands, for a shell that finds it by PATH."""
    folder.mkdir()
    for module in ("train", "run", "plan"):
        path = folder / f"kaitian-{module}"
        rank = shlex.join(forked([str(SCRIPTS / path.name)]))
        path.write_text(PROGRAM.format(python=PYTHON, module=module, path=path, forked=rank))
        path.chmod(0o755)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(forked([PYTHON]))} "$@"\n')
    python.chmod(0o755)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a home folder with what the pages presume, and programs that fork ranks."""
    home = tmp_path_factory.mktemp("home")
    write_pictures(home)
    write_programs(home / "bin")
    torch.save(build_model("resnet18", 10).state_dict(), home / "weights.pt")
    return home


@pytest.fixture(scope="module")
def folder_of(home):
    """Return the folder of a page, with the files that it names."""

    def make(page):
        folder = home / page
        if folder.exists():
            return folder
        task = re.findall(
            r"^```python\n((?:(?!^```).)*def build\(hidden.*?)^```$",
            (ROOT / "docs/your-own-data.md").read_text(),
            re.M | re.S,
        )
        settings = re.findall(
            r"^```toml\n(.*?)^```$", (ROOT / "docs/training.md").read_text(), re.M | re.S
        )
        files = MODULES | {"mytask.py": task[0], "run.toml": settings[0]}
        if page == "your-own-training":
            text = (ROOT / "docs" / f"{page}.md").read_text()
            files["train.py"] = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text(text)
        (folder / "weights.pt").symlink_to(home / "weights.pt")
        (folder / "examples").symlink_to(ROOT / "examples")
        return folder

    return make


def with_short_flags(command):
    if "kaitian-train" in command:
        return f"{command} {SHORT}"
    if "kaitian-plan" in command and "--save" in command:
        return f"{command} --global-batch-size 16 --benchmark-seconds 0.1"
    return command


def write_missing_files(command, folder):
    """Write the runs or measurements that a command reads, if no command before it has."""
    if command.startswith("kaitian-report"):
        for name in re.findall(r"runs/\S+", command):
            if not (folder / name).exists():
                make_run(folder / name)
    if "--world" in command and not (folder / "measured.json").exists():
        kinds = re.findall(r"\d+x(\w+)", command)
        cost = RankCost(0.004, 8e-4)
        measured = Measurements(
            model="cnn",
            emulated=True,
            gradient_bytes=9_400_000,
            global_batch_size=256,
            ranks=tuple(
                MeasuredRank(rank, "host", kind, f"{kind}:0", cost, 0.01)
                for rank, kind in enumerate(kinds)
            ),
            allreduces=(MeasuredAllreduce(dict.fromkeys(kinds, 1), AllreduceCost(5e-4, 8e-10)),),
        )
        (folder / "measured.json").write_text(json.dumps(measured.to_json()))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command, marks=() if SHORT_ONES.search(command) else pytest.mark.thorough, id=command
        )
        for command in COMMANDS
    ],
)
def test_a_documented_command_does_what_it_says(home, folder_of, command):
    folder = folder_of(COMMANDS[command])
    write_missing_files(command, folder)
    path = f"{home / 'bin'}:{ENVIRONMENT['PATH']}"
    line = with_short_flags(command)
    ended = run_alone("bash", "-c", line, cwd=folder, code=None, HOME=str(home), PATH=path)
    allowed = {0, 1} if "doctor" in command else {0}  # a test's machine may have a problem
    assert ended.code in allowed, f"{line}\n{ended.text}"
    assert "Traceback" not in ended.text
    if "kaitian-train" in command:
        assert re.search("finished after|is finished", ended.text), f"{line}\n{ended.text}"
