"""Counts how large the project is, and how much of it one start, one step and one bucket pass.

    python benchmarks/house.py [--quick]

Prints each figure beside the one of 2026-11-24, before the package was condensed. --quick leaves
out what starts two ranks: the modules that `kaitian-train --model cnn` has imported when its first
step begins, and the files of the package whose functions a step and a bucket pass.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import kaitian_mpi
from kaitian_mpi.cli.flags import SECTIONS
from kaitian_mpi.cli.train import main as kaitian_train
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.mpi import datatypes

PACKAGE = Path(kaitian_mpi.__file__).parent
ROOT = PACKAGE.parent
BEFORE = {
    "lines of the package": 44_235,
    "files": 347,
    "rooms": 34,
    "lines of the tests": 35_400,
    "words of the docs": 41_000,
    "flags of kaitian-train": 70,
    "global statements": 18,
    "files that name emulation": 51,
    "modules imported before the first step": 280,
    "files a step": 64,
    "functions a step": 254,
    "files a bucket": 26,
}


def count_sources() -> dict[str, int]:
    """Return what can be counted without training."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    return {
        "lines of the package": sum(len(text.splitlines()) for text in texts.values()),
        "files": len(texts),
        "rooms": len({path.parent for path in texts if path.parent.parent == PACKAGE}),
        "lines of the tests": sum(len(text.splitlines()) for text in tests),
        "words of the docs": sum(
            len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")
        ),
        "flags of kaitian-train": sum(len(names.split()) for names in SECTIONS.values()),
        "global statements": sum(isinstance(node, ast.Global) for node in nodes),
        "files that name emulation": sum("emulat" in text.lower() for text in texts.values()),
    }


def count_in_ranks(what: str) -> dict[str, int]:
    """Return what a job of two ranks counts, which runs this file with --rank `what`."""
    job = ["mpirun", "-np", "2", sys.executable, __file__, "--rank", what]
    with tempfile.TemporaryDirectory() as folder:
        printed = subprocess.run(
            job, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    if printed.returncode:
        sys.exit(printed.stdout + printed.stderr)
    (line,) = [line for line in printed.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def print_counts(rank: int, counts: dict[str, int]) -> None:
    """Print the counts of rank 0 as a line, for `count_in_ranks`."""
    if rank == 0:
        print(f"\n{json.dumps(counts)}", flush=True)


def count_start() -> None:
    """Train one step with `kaitian-train`, and count the imported modules when it begins."""
    imported: list[int] = []  # at each step of an optimizer; the last one is the run's

    def note(*_: object) -> None:
        imported.append(sum(name.startswith("kaitian_mpi.") for name in sys.modules))

    register_optimizer_step_pre_hook(note)
    data = ["--dataset", "synthetic", "--max-steps", "1"]
    sys.argv = ["kaitian-train", "--model", "cnn", "--quiet", *data]
    kaitian_train()
    print_counts(kaitian_mpi.init().rank, {"modules imported before the first step": imported[-1]})


class Trace:
    """Notes which functions of the package are called while it is on, in all threads."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        self.is_on = False
        self.functions: set[tuple[str, str]] = set()
        self.bucket: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note one event, as a profile function of `sys.setprofile`."""
        name = frame.f_code.co_filename
        if not self.is_on or event != "call" or not name.startswith(str(PACKAGE)):
            return
        self.functions.add((name, frame.f_code.co_qualname))
        if frame.f_code in (Worker._put.__code__, datatypes.as_buffer.__code__):
            stack = [each.filename for each in traceback.extract_stack(frame)]
            reducer = str(PACKAGE / "distributed" / "reducer.py")
            first = stack.index(reducer) if reducer in stack else 0
            self.bucket |= {each for each in stack[first:] if each.startswith(str(PACKAGE))}


def count_step() -> None:
    """Train a task, and count what one step passes."""
    trace = Trace()
    threading.setprofile(trace)
    inputs = torch.randn(64, 8)
    task = kaitian_mpi.Task(
        model=nn.Linear(8, 1),
        data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )
    with kaitian_mpi.Training(task, global_batch_size=8, balance="off", quiet=True) as training:
        for step in training:
            trace.is_on = step.number == 2
            sys.setprofile(trace if trace.is_on else None)
    counts = {
        "files a step": len({name for name, _ in trace.functions}),
        "functions a step": len(trace.functions),
        "files a bucket": len(trace.bucket),
    }
    print_counts(training.world.rank, counts)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="count the sources only")
    parser.add_argument("--rank", choices=("start", "step"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return count_start() if arguments.rank == "start" else count_step()
    counts = count_sources()
    if not arguments.quick:
        counts |= count_in_ranks("start") | count_in_ranks("step")
    for name, count in counts.items():
        print(f"{name:40} {count:>8,} (before: {BEFORE[name]:,})")


if __name__ == "__main__":
    main()
