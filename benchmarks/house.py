"""Counts how large the project is, and how much of it one start, one step and one bucket pass.

    python benchmarks/house.py [--quick]

Prints each figure beside the one of an earlier day. --quick leaves out what starts two ranks: the
modules that `kaitian-train --model cnn` has imported when its first step begins, and the files of
the package whose functions a step and a bucket pass.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeGuard

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
# The figures of 2026-11-24, before the package was condensed, and of 2026-11-27, before the layouts
# were rebuilt, of what was not counted until then.
BEFORE = {
    "lines of the package": 44_235,
    "files": 347,
    "subpackages": 34,
    "lines of the tests": 35_400,
    "words of the docs": 41_000,
    "flags of kaitian-train": 70,
    "global statements": 18,
    "files that name emulation": 51,
    "classes with more than 20 methods": 11,
    "most methods of a class": 47,
    "classes with more than 15 attributes": 12,
    "most attributes of a class": 32,
    "class names used more than once": 14,
    "file names used more than once": 14,
    "tuples assigned to attributes": 196,
    "attributes set from outside": 182,
    "imports inside functions": 117,
    "files that name a layout": 46,
    "comparisons with a layout": 30,
    "modules imported before the first step": 280,
    "files a step": 64,
    "functions a step": 254,
    "files a bucket": 26,
}
MAX_METHODS = 20
MAX_ATTRIBUTES = 15
LAYOUT_WORDS = re.compile(r"shard|pipeline|mirror", re.IGNORECASE)


def count_sources() -> dict[str, int]:
    """Return what can be counted without training."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    return {
        "lines of the package": sum(len(text.splitlines()) for text in texts.values()),
        "files": len(texts),
        "subpackages": len({path.parent for path in texts if path.parent.parent == PACKAGE}),
        "lines of the tests": sum(len(text.splitlines()) for text in tests),
        "words of the docs": sum(
            len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")
        ),
        "flags of kaitian-train": sum(len(names.split()) for names in SECTIONS.values()),
        "global statements": sum(isinstance(node, ast.Global) for node in nodes),
        "files that name emulation": sum("emulat" in text.lower() for text in texts.values()),
        **count_classes(nodes),
        **count_statements(nodes),
        "file names used more than once": count_repeated(path.name for path in texts),
        "files that name a layout": sum(bool(LAYOUT_WORDS.search(text)) for text in texts.values()),
    }


def count_repeated(names: Iterable[str]) -> int:
    """Return how many different names occur more than once."""
    return sum(count > 1 for count in Counter(names).values())


def count_classes(nodes: Sequence[ast.AST]) -> dict[str, int]:
    """Return how large the classes are. Properties count as methods do."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = [
        sum(isinstance(statement, ast.FunctionDef) for statement in node.body) for node in classes
    ]
    attributes = [len(attributes_of(node)) for node in classes]
    return {
        "classes with more than 20 methods": sum(count > MAX_METHODS for count in methods),
        "most methods of a class": max(methods),
        "classes with more than 15 attributes": sum(count > MAX_ATTRIBUTES for count in attributes),
        "most attributes of a class": max(attributes),
        "class names used more than once": count_repeated(node.name for node in classes),
    }


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class's methods set on `self`."""
    stored = (attribute for attribute in ast.walk(node) if is_stored_attribute(attribute))
    return {attribute.attr for attribute in stored if is_self(attribute.value)}


def is_stored_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Return whether it is an attribute that is set."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def is_self(node: ast.AST) -> bool:
    """Return whether it is a method's own object or class."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def count_statements(nodes: Sequence[ast.AST]) -> dict[str, int]:
    """Return how often something is written that a reader has to take apart."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    imports = {
        statement for node in functions for statement in ast.walk(node) if is_import(statement)
    }
    return {
        "tuples assigned to attributes": sum(map(sets_tuple_of_attributes, nodes)),
        "attributes set from outside": sum(
            is_stored_attribute(node) and not is_self(node.value) for node in nodes
        ),
        "imports inside functions": len(imports),
        "comparisons with a layout": sum(map(compares_layout, nodes)),
    }


def is_import(node: ast.AST) -> bool:
    """Return whether it is an import of a module, or from one."""
    return isinstance(node, ast.Import | ast.ImportFrom)


def sets_tuple_of_attributes(node: ast.AST) -> bool:
    """Return whether it is an assignment of several values, one of them to an attribute."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else []
    return any(isinstance(target, ast.Attribute) for target in targets)


def compares_layout(node: ast.AST) -> bool:
    """Return whether something's `layout` is compared."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(isinstance(side, ast.Attribute) and side.attr == "layout" for side in sides)


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
        if name.endswith("store_server.py"):  # it answers other ranks, at any time
            return
        self.functions.add((name, frame.f_code.co_qualname))
        if frame.f_code in (Worker._put.__code__, datatypes.as_buffer.__code__):
            stack = [entry.filename for entry in traceback.extract_stack(frame)]
            reducer = str(PACKAGE / "distributed" / "reducer.py")
            first = stack.index(reducer) if reducer in stack else 0
            self.bucket |= {file for file in stack[first:] if file.startswith(str(PACKAGE))}


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
