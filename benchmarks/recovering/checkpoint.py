"""Measures how long a checkpoint blocks training, and the slowdown while one is written.

    PYTHONPATH=benchmarks mpirun -np 2 python benchmarks/recovering/checkpoint.py

World rank 0 prints a line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from shared.loops import metadata_of, timed
from trainers import endless, make_config, make_loop

import kaitian_mpi
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.checkpoint.writer import Checkpoints

WARM_UP = 4


def is_writing(world: World, checkpoints: Checkpoints) -> bool:
    """Return whether any rank is writing. Collective."""
    return any(
        gather_values(world.comm, bool(checkpoints.on_disk and checkpoints.on_disk.is_writing))
    )


def measure(world: World, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Save every few steps and return the times. Collective."""
    config = make_config(options.model, options.batch)
    loop = make_loop(config, world)
    metadata = metadata_of(config, world, loop.sampler.batch_sizes)
    checkpoints = Checkpoints(config, folder)
    steps = endless(loop)
    timed(world, steps, WARM_UP)
    saves, written, normal, after = [], [], [], []
    for _ in range(options.saves):
        sleeping_barrier(world.comm)
        began, clock = time.perf_counter(), time.time()
        checkpoints.save(world, loop.state, metadata)
        saves.append(time.perf_counter() - began)
        after.append(timed(world, steps, 1))
        while is_writing(world, checkpoints):
            next(steps)
        newest = max((path.stat().st_mtime for path in folder.rglob("*.json")), default=clock)
        written.append(newest - clock)
        normal += [timed(world, steps, 1) for _ in range(options.steps)]
    checkpoints.close()
    loop.close()
    by_rank = gather_values(world.comm, saves)
    size = max((path.stat().st_size for path in folder.rglob("*.pt")), default=0)
    step = statistics.median(normal)
    return {
        "save_ms": [[round(1e3 * seconds, 2) for seconds in times] for times in by_rank],
        "median_ms": 1e3 * statistics.median(max(times) for times in zip(*by_rank, strict=True)),
        "worst_ms": 1e3 * max(max(times) for times in by_rank),
        "megabytes": size / 1e6,
        "written_sec": statistics.median(written),
        "step_sec": step,
        "next_step_sec": statistics.median(after),
        "next_over_normal": statistics.median(after) / step,
    }


def main() -> None:
    """Measure; world rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=32, help="global batch")
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps between saves, without writing")
    options = parser.parse_args()
    world = kaitian_mpi.init()
    with tempfile.TemporaryDirectory(prefix="kaitian-checkpoint-") as folder:
        found = measure(world, Path(folder), options)
        sleeping_barrier(world.comm)
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
