"""How much memory it takes to save a large training state, to resume from it and to hand it over.

    python benchmarks/state_memory.py                  # a state of 0.5 GiB
    python benchmarks/state_memory.py --state-gib 2    # takes up to 16 GiB of memory, and 5 of disk

Trains a model by SGD with momentum, so that half of the state is parameters and half is momentum,
in three jobs: one that saves, one that resumes, and one in which a spare takes over from a lost
rank. Prints the largest memory of each rank in each operation, relative to the state, so that 1.00
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
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from shared.loops import LoopMaker, metadata_of
from torch import nn

import kaitian_mpi
from kaitian_mpi.balance.shares import plan_equal
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import DiskFolder, NoFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.checkpoint.resume import find_checkpoint, restore
from kaitian_mpi.train.checkpoint.writer import Checkpoints
from kaitian_mpi.train.divergence import repair_divergence
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.state import sync_to_latest, weights

WIDTH = 1024
LAYER_BYTES = 2 * 4 * WIDTH * WIDTH  # its weights and their momentum
STEPS = 6
BATCH = 16
SNAPSHOTS = "statememory"
ROWS = ("checkpoint", "snapshot", "model.pt", "resume", "spare")
"""The operations, in the order of the table."""


def memory_bytes(name: str) -> int:
    """Return this process's memory: VmRSS, or the largest so far, VmHWM."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


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

    @contextmanager
    def measured(self, operation: str, before: int | None = None) -> Iterator[None]:
        """Record what is done meanwhile.

        Args:
            operation: its place in the table.
            before: as of `peak`, restarted by the caller; None: the process was empty.
        """
        begin = time.perf_counter()
        with FolderSize() as folder:
            yield
        sec = time.perf_counter() - begin
        self.record(operation, peak=self.peak(before), sec=sec, folder=folder.bytes / self._state)


def make_maker(world: World, config: TrainConfig, state_bytes: int) -> LoopMaker:
    """Return what trains the state by SGD with momentum. Collective."""
    torch.manual_seed(0)
    layers = state_bytes // LAYER_BYTES
    task = kaitian_mpi.Task(
        model=nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))),
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, foreach=False
        ),
        data=torch.randn(64, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
    )
    return LoopMaker(config, world, task)


def train_steps(maker: LoopMaker, world: World, count: int) -> None:
    """Train so many steps, with equal batches. Collective."""
    loop = maker.make(Plan(plan_equal(world.size, BATCH), [1.0] * world.size, None, None))
    for _ in range(count):
        parts = loop.next_share()
        assert parts is not None
        loop.train(parts)
    loop.close()


def save(world: World, meter: Meter, config: TrainConfig, maker: LoopMaker, folder: Path) -> None:
    """Measure training, a checkpoint, two snapshots and the model's file. Collective."""
    train_steps(maker, world, STEPS)
    meter.record("training", peak=meter.peak())
    checkpoints, state = Checkpoints(config, folder), maker.state
    metadata = metadata_of(config, world, plan_equal(world.size, BATCH))
    for _ in range(2):
        with meter.measured("checkpoint", restart_peak()):
            checkpoints.save(world, state, metadata)
            checkpoints.wait()
    for _ in range(2):  # the second replaces the first
        with meter.measured("snapshot", restart_peak()):
            if world.rank == 0:  # the first of its host
                assert checkpoints.in_memory is not None
                checkpoints.write(checkpoints.in_memory, state, state.shared(), metadata)
            checkpoints.wait_if_large(world, state)
            checkpoints.wait()
    run_folder = DiskFolder(folder) if world.rank == 0 else NoFolder()
    with meter.measured("model.pt", restart_peak()):
        model, _ = state.collect_model(world, folder)
        run_folder.save_model(weights(model) if world.rank == 0 else {})
    sleeping_barrier(world.comm)
    checkpoints.close()


def resume(world: World, meter: Meter, config: TrainConfig, maker: LoopMaker, folder: Path) -> None:
    """Measure how a job that has just started restores the checkpoint. Collective."""
    with meter.measured("resume"):
        checkpoint = find_checkpoint(config, world, folder, "auto")
        assert checkpoint.metadata is not None
        restore(world, maker.state, checkpoint, config.seed, world.infos)


def hand_over(
    world: World, meter: Meter, config: TrainConfig, maker: LoopMaker, folder: Path
) -> None:
    """Measure how the last rank, which has not trained, receives the state. Collective."""
    is_spare = world.rank == world.size - 1
    state = maker.state
    if not is_spare:
        for parameter in state.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        state.optimizers[0].step()
        state.zero_gradients()
        state.progress.step = 1
        state.is_begun = True
    sleeping_barrier(world.comm)
    with meter.measured("spare", None if is_spare else restart_peak()):
        sync_to_latest(state, world, is_spare)
        repair_divergence(world, state, Sinks())


OPERATIONS = {"save": save, "resume": resume, "spare": hand_over}


def measure(job: str, state_bytes: int, folder: Path) -> None:
    """Take part in one of the jobs, as one rank of it."""
    world = kaitian_mpi.init()
    meter = Meter(state_bytes, folder / f"{job}-{world.rank}.jsonl")
    config = TrainConfig(
        global_batch_size=BATCH,
        epochs=10,
        checkpoint_copy_mb=0,  # a state of any size counts as large
        snapshots=SNAPSHOTS if job == "save" else "",
    )
    maker = make_maker(world, config, state_bytes)
    OPERATIONS[job](world, meter, config, maker, folder / "run")
    maker.close()
    dist.destroy_process_group()


def run(job: str, state_bytes: int, folder: Path) -> None:
    """Run one of the jobs.

    Raises:
        RuntimeError: it has failed.
    """
    rank_command = [sys.executable, __file__, "--job", job, "--bytes", str(state_bytes)]
    command = ["mpirun", "-np", "2", *rank_command, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def show(folder: Path) -> None:
    """Print the table."""
    by_operation: dict[str, dict[int, list[dict[str, float]]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rank = int(path.stem.partition("-")[2])
        for line in path.read_text().splitlines():
            figures = json.loads(line)
            of_ranks = by_operation.setdefault(figures.pop("operation"), {})
            of_ranks.setdefault(rank, []).append(figures)
    print("| | rank 0 | rank 1 | host's /dev/shm | s |\n|---|---|---|---|---|")
    for operation in ROWS:
        of_ranks = by_operation.get(operation, {})
        peaks = {
            rank: max(figures["peak"] for figures in of_rank) for rank, of_rank in of_ranks.items()
        }
        all_figures = [figures for of_rank in of_ranks.values() for figures in of_rank]
        size = max((figures.get("folder", 0) for figures in all_figures), default=0)
        sec = max((figures.get("sec", 0) for figures in all_figures), default=0)
        cells = [f"{peaks[rank]:.2f}" if rank in peaks else "" for rank in range(2)]
        cells += [f"{size:.2f}" if operation == "snapshot" else "", f"{sec:.1f}" if sec else ""]
        print(f"| {operation} | {' | '.join(cells)} |")
    trained = by_operation["training"]
    peaks = [f"{max(figures['peak'] for figures in trained[rank]):.2f}" for rank in sorted(trained)]
    print(f"\nlargest while it trains, with gradients: {', '.join(peaks)}")


def main() -> None:
    """Run all jobs, or with --job one rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state-gib", type=float, default=0.5, help="size of the state in GiB")
    for hidden in ("--job", "--bytes", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        measure(options.job, int(options.bytes), Path(options.folder))
        return
    layers = round(options.state_gib * 2**30 / LAYER_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        for job in OPERATIONS:
            run(job, layers * LAYER_BYTES, Path(folder))
        show(Path(folder))


if __name__ == "__main__":
    main()
