"""How much memory it takes to save a large training state, to resume from it and to hand it over.

    python benchmarks/state_memory.py                  # a state of 0.5 GiB
    python benchmarks/state_memory.py --state-gib 2    # takes up to 16 GiB of memory, and 5 of disk

Trains a model by SGD with momentum, so that half of the state is parameters and half is momentum,
in three jobs: one that saves, one that resumes, and one that loses a rank, for which a spare takes
over. Prints the largest memory of each rank in each operation, relative to the state, so that 1.00
is the state itself. What a process had before there was a model is subtracted, as are the gradients
and their buffers where a rank has trained before: what was in memory when the operation began
counts as 1.00. A write in the background counts until it is done. For a snapshot, which is a file
in the host's memory, a column has the largest size of its folder: when one replaces another. The
last column is the longest time that an operation took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 1024
LAYER_BYTES = 2 * 4 * WIDTH * WIDTH  # its weights and their momentum
STEPS = 6
VICTIM = 1
JOBS = ("save", "resume", "spare")
SNAPSHOTS = "statememory"
ROWS = ("checkpoint", "snapshot", "model.pt", "resume", "spare")
"""The operations, in the order of the table."""


def memory_bytes(name: str) -> int:
    """Return this process's memory: VmRSS, or the largest so far, VmHWM."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def restart_peak() -> int:
    """Give freed memory back, reset VmHWM to the present memory, and return that."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


class FolderSize:
    """The largest size of the snapshots' folder, while this is entered."""

    def __enter__(self) -> FolderSize:
        self.bytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            files = list(Path("/dev/shm").glob(f"kaitian-{SNAPSHOTS}-*/*"))
            sizes = []
            for file in files:
                try:
                    sizes.append(file.stat().st_blocks * 512)
                except FileNotFoundError:  # just removed or renamed
                    continue
            self.bytes = max(self.bytes, sum(sizes))


class Meter:
    """Measures operations on this rank, and writes what they took to a file."""

    def __init__(self, state_bytes: int, path: Path) -> None:
        self._state, self._path = state_bytes, path
        self._empty = restart_peak()

    def record(self, operation: str, **figures: float) -> None:
        """Add a line to the file."""
        with self._path.open("a") as file:
            file.write(json.dumps({"operation": operation, **figures}) + "\n")

    def peak(self, before: int | None = None) -> float:
        """Return the largest memory since the last reset, relative to the state.

        Args:
            before: what there was when the operation began, which counts as one state; None: the
                process was empty.
        """
        largest = memory_bytes("VmHWM")
        if before is None:
            return (largest - self._empty) / self._state
        return 1 + (largest - before) / self._state

    def watch(
        self,
        owner: type,
        name: str,
        operation: Callable[[], str],
        end: Callable[[Any], None] = lambda owner: None,
    ) -> None:
        """Measure a method: each call that does something.

        Args:
            owner: its class.
            name: its name.
            operation: what a call is, by its place in the table; empty if it is not measured.
            end: waits, given the object, until what the method has started is done.
        """
        original = getattr(owner, name)

        def measured(self: Any, *args: Any, **options: Any) -> Any:
            what = operation()
            before, begin = restart_peak(), time.perf_counter()
            with FolderSize() as folder:
                result = original(self, *args, **options)
                end(self)
            if what:
                sec = time.perf_counter() - begin
                held = (before - meter._empty) / meter._state
                size = folder.bytes / meter._state
                meter.record(what, peak=meter.peak(before), held=held, sec=sec, folder=size)
            return result

        meter = self
        setattr(owner, name, measured)


def train(job: str, state_bytes: int, folder: Path) -> None:
    """Take part in one of the jobs, as one rank of it."""
    import torch
    from torch import nn

    import kaitian_mpi
    from kaitian_mpi.observe.run_folder import DiskFolder
    from kaitian_mpi.train import begin_loop, saving
    from kaitian_mpi.train.checkpoint import resume as resuming
    from kaitian_mpi.train.checkpoint.writer import Checkpoints
    from kaitian_mpi.train.run import Run

    world = kaitian_mpi.init()
    rank = world.rank
    torch.manual_seed(0)
    meter = Meter(state_bytes, folder / f"{job}-{rank}.jsonl")
    task = kaitian_mpi.Task(
        model=nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(state_bytes // LAYER_BYTES))
        ),
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, foreach=False
        ),
        data=torch.randn(64, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
    )
    original = begin_loop._restore_state
    restored = 0

    def restore_state(run: Run, *arguments: Any) -> None:
        nonlocal restored
        survives = restored > 0 or (job == "spare" and rank != 2)
        before = restart_peak() if survives else None
        original(run, *arguments)
        restored += 1
        if run.membership.losses:
            meter.record(job, peak=meter.peak(before))

    begin_loop._restore_state = restore_state
    resume = resuming.resume

    def resume_run(*arguments: Any) -> Any:
        result = resume(*arguments)
        if job == "resume":
            meter.record(job, peak=meter.peak(None))
        return result

    resuming.resume = resume_run
    if job == "save":
        meter.watch(Checkpoints, "save", lambda: "checkpoint", Checkpoints.wait)
        meter.watch(DiskFolder, "save_model", lambda: "model.pt")
        saving._SNAPSHOT_SHARE = float("inf")
        due = iter(range(100))
        meter.watch(
            *(saving.Saving, "_snapshot"),
            lambda: "snapshot" if next(due) in (0, 3) else "",
            lambda saver: saver._checkpoints.wait(),
        )
    options: dict[str, Any] = {
        "save": {"snapshots": SNAPSHOTS, "snapshot_every": 4},
        "resume": {"resume": "auto"},
        "spare": {"spares": 1, "snapshots": "", "checkpoint_minutes": 0},
    }[job]
    if job != "spare":
        options |= {"run_dir": str(folder / "run"), "checkpoint_every": 3}
    with kaitian_mpi.Training(
        task,
        global_batch_size=16,
        max_steps=STEPS if job == "save" else STEPS + 2,
        epochs=10,
        checkpoint_copy_mb=0,  # a state of any size counts as large
        balance="off",
        check_every=0,
        **options,
    ) as training:
        for step in training:
            if job == "spare" and step.number == 3 and rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            if job == "save":
                meter.record("training", peak=meter.peak())


def run(job: str, state_bytes: int, folder: Path) -> None:
    """Run one of the jobs.

    Raises:
        RuntimeError: it has failed.
    """
    launcher = ["mpirun", "-np", "2"]
    if job == "spare":
        launcher = ["mpirun", "--with-ft", "ulfm", "-np", "3"]
    own = [sys.executable, __file__, "--job", job, "--bytes", str(state_bytes)]
    done = subprocess.run(
        [*launcher, *own, "--folder", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode and job != "spare":
        raise RuntimeError(done.stdout + done.stderr)


def show(folder: Path) -> None:
    """Print the table."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rank = int(path.stem.partition("-")[2])
        for line in path.read_text().splitlines():
            figures = json.loads(line)
            of_ranks = found.setdefault(figures.pop("operation"), {})
            of_ranks.setdefault(rank, []).append(figures)
    print("| | rank 0 | rank 1 | rank 2 | host's /dev/shm | s |\n|---|---|---|---|---|---|")
    for operation in ROWS:
        of_ranks = found.get(operation, {})
        peaks = {rank: max(each["peak"] for each in all_) for rank, all_ in of_ranks.items()}
        every = [each for all_ in of_ranks.values() for each in all_]
        size = max((each.get("folder", 0) for each in every), default=0)
        sec = max((each.get("sec", 0) for each in every), default=0)
        cells = [f"{peaks[rank]:.2f}" if rank in peaks else "" for rank in range(3)]
        cells += [f"{size:.2f}" if operation == "snapshot" else "", f"{sec:.1f}" if sec else ""]
        print(f"| {operation} | {' | '.join(cells)} |")
    trained = found["training"]
    peaks = [f"{max(each['peak'] for each in trained[rank]):.2f}" for rank in sorted(trained)]
    print(f"\nlargest while it trains, with gradients: {', '.join(peaks)}")


def main() -> None:
    """Run all jobs, or with --job one rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state-gib", type=float, default=0.5, help="size of the state in GiB")
    for hidden in ("--job", "--bytes", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        train(options.job, int(options.bytes), Path(options.folder))
        return
    layers = round(options.state_gib * 2**30 / LAYER_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        for job in JOBS:
            run(job, layers * LAYER_BYTES, Path(folder))
        show(Path(folder))


if __name__ == "__main__":
    main()
