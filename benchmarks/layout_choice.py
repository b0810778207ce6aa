"""Compares what `layout="auto"` predicts with what each layout takes, in jobs of several sizes.

    mpirun -np 2 --map-by core --bind-to core python benchmarks/layout_choice.py [--jobs 10]

Rank 1 is another kind of device than rank 0, and up to four times slower (emulated). Prints for
each job the predicted and measured milliseconds of a step by layout, and how much slower the chosen
one is than the fastest, measured; at the end in how many jobs all predictions are within 15%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from shared.gpt import Embeddings, loss_of, make_optimizer
from torch import nn

import kaitian_mpi
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import sleeping_barrier

VOCABULARY = 256
LAYOUTS = "replicate", "shard", "pipeline"
WITHIN = 0.15


class Job(NamedTuple):
    """A GPT, the samples of a step, and how much slower rank 1 is."""

    width: int
    blocks: int
    length: int
    batch: int
    slowdown: float


JOBS = (
    Job(128, 4, 32, 32, 1),
    Job(128, 4, 32, 32, 3),
    Job(256, 4, 32, 16, 2),
    Job(256, 8, 16, 32, 1),
    Job(512, 4, 8, 16, 3),
    Job(64, 12, 64, 16, 2),
    Job(512, 2, 32, 16, 1),
    Job(384, 6, 16, 24, 4),
    Job(256, 2, 64, 32, 1.5),
    Job(640, 4, 8, 8, 2),
)


def make_task(job: Job) -> kaitian_mpi.Task:
    """Return the training of a GPT to predict random tokens."""
    torch.manual_seed(0)
    block = partial(nn.TransformerEncoderLayer, job.width, 4, 4 * job.width, 0.0, batch_first=True)
    blocks = [block() for _ in range(job.blocks)]
    head = nn.Linear(job.width, VOCABULARY)
    first = Embeddings(VOCABULARY, job.length, job.width)
    return kaitian_mpi.Task(
        model=nn.Sequential(first, *blocks, head),
        optimizer=make_optimizer,
        data=torch.randint(VOCABULARY, (20_000, job.length + 1)),
        loss=loss_of,
    )


def train(world: World, job: Job, steps: int, **settings: object) -> float:
    """Return the slowest rank's median seconds of a step, of the second half. Collective."""
    quiet = {"quiet": True, "progress": "none", "parity": False, "check_every": 0}
    taken = []
    with kaitian_mpi.Training(
        partial(make_task, job),
        global_batch_size=job.batch,
        max_steps=steps,
        emulate_slowdown=f"1:{job.slowdown}" if job.slowdown > 1 else "",
        keep_all=True,
        log_interval=1e9,
        **quiet,
        **settings,
    ) as training:
        began = time.perf_counter()
        for _ in training:
            now = time.perf_counter()
            taken.append(now - began)
            began = now
    sleeping_barrier(world.comm)
    return max(gather_values(world.comm, statistics.median(taken[len(taken) // 2 :])))


def predict(world: World, job: Job) -> tuple[dict[str, float], str]:
    """Return the predicted seconds of a step by layout, and the chosen one. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(gather_values(world.comm, folder)[0])
        train(world, job, 1, layout="auto", run_dir=str(where))
        content = json.loads((where / "layouts.json").read_text()) if world.rank == 0 else None
        sleeping_barrier(world.comm)
    content = gather_values(world.comm, content)[0]
    return {each["layout"]: each["step_sec"] for each in content["layouts"]}, content["chosen"]


def main() -> None:
    """Print a line per job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(JOBS))
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    world = kaitian_mpi.init(emulate_kinds="gpu,mlu")
    good, lost = 0, []
    for job in JOBS[: options.jobs]:
        predicted, chosen = predict(world, job)
        measured = {layout: train(world, job, options.steps, layout=layout) for layout in LAYOUTS}
        errors = [predicted[layout] / measured[layout] - 1 for layout in LAYOUTS]
        good += all(abs(error) <= WITHIN for error in errors)
        lost.append(measured[chosen] / min(measured.values()) - 1)
        if world.rank == 0:
            each = ", ".join(
                f"{name} {1e3 * predicted[name]:.0f} / {1e3 * measured[name]:.0f} ({error:+.0%})"
                for name, error in zip(LAYOUTS, errors, strict=True)
            )
            print(f"{tuple(job)}: {each}; {chosen} is {lost[-1]:.0%} from the best", flush=True)
    if world.rank == 0:
        print(f"all predictions within {WITHIN:.0%}: {good} of {len(lost)} jobs")
        print(f"the choice at most {max(lost):.0%} slower than the best")


if __name__ == "__main__":
    main()
