"""Compares the layouts of a training, alternating in one run, on a GPT.

    mpirun -np 4 python benchmarks/layouts.py
    mpirun -np 4 --with-ft ulfm python benchmarks/layouts.py      (with mirrors)

Prints, with two emulated device kinds of two ranks each and equal shares of the samples:

    speed    samples/s of layout shard / replicate, where a replica fits each rank
    memory   what each rank has of the gradients and the optimizer's state, against its share

Medians and quartiles over pairs of blocks; world rank 0 prints.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shared.comparison import in_turns, quartiles, ratios
from shared.gpt import GPT, loss_of, make_optimizer

import kaitian_mpi
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import sleeping_barrier

VOCABULARY, LENGTH = 256, 64


def make_task(width: int, layers: int) -> kaitian_mpi.Task:
    """Return the training of a GPT to predict random tokens."""
    torch.manual_seed(0)
    return kaitian_mpi.Task(
        model=GPT(VOCABULARY, LENGTH, width, layers),
        optimizer=make_optimizer,
        data=torch.randint(VOCABULARY, (20_000, LENGTH + 1)),
        loss=loss_of,
        clip_norm=1.0,
    )


def open_training(options: argparse.Namespace, **settings: Any) -> kaitian_mpi.Training:
    """Return a training with equal shares. Collective."""
    quiet = {"balance": "off", "parity": False, "check_every": 0, "log_interval": 1e9}
    return kaitian_mpi.Training(
        partial(make_task, options.width, options.layers),
        **{"global_batch_size": options.batch, "quiet": True, "progress": "none", **quiet},
        **settings,
    )


def seconds_per_step(world: World, options: argparse.Namespace, **settings: Any) -> float:
    """Return the slowest rank's median seconds per step of a training. Collective."""
    with open_training(options, **settings) as training:
        steps = iter(training)
        for _ in range(options.settle):
            next(steps)
        sleeping_barrier(world.comm)
        began, taken = time.perf_counter(), []
        for _ in range(options.steps):
            next(steps)
            now = time.perf_counter()
            taken.append(now - began)
            began = now
        steps.close()
    return max(gather_values(world.comm, statistics.median(taken)))


def compare_speed(world: World, options: argparse.Namespace) -> None:
    """Print how fast layout shard is, relative to replicate. Collective."""
    calls = {
        layout: partial(seconds_per_step, world, options, layout=layout)
        for layout in ("replicate", "shard")
    }
    seconds = in_turns(calls, options.pairs, warm_up=0)
    speeds = quartiles(ratios(seconds["replicate"], seconds["shard"]))
    each = ", ".join(f"{name} {1e3 * statistics.median(s):.1f} ms" for name, s in seconds.items())
    if world.rank == 0:
        print(f"speed: shard / replicate {speeds}; {each}")


def compare_memory(world: World, options: argparse.Namespace) -> None:
    """Print what each rank has in layout shard, relative to its share. Collective."""
    with open_training(options, layout="shard", mirrors=False) as training:
        next(iter(training))
        states = [each for o in training.optimizers for each in o.state.values()]
        own = sum(v.nbytes for s in states for v in s.values() if v.dim())
        owned = sum(
            p.nbytes for o in training.optimizers for g in o.param_groups for p in g["params"]
        )
        budget = training._session.prepared.layout._budget  # type: ignore[union-attr]
    held = gather_values(world.comm, own + owned)  # a gradient is as large as its part
    places = [info.place for info in world.infos]
    shares = [budget.by_place[place] / sum(budget.by_place.values()) for place in places]
    off = [each / sum(held) / share - 1 for each, share in zip(held, shares, strict=True)]
    if world.rank == 0:
        text = ", ".join(
            f"{each / 1e6:.1f} MB ({part:+.1%})" for each, part in zip(held, off, strict=True)
        )
        print(f"memory: gradients and optimizer state by rank, against the shares: {text}")


SECTIONS: dict[str, Callable[[World, argparse.Namespace], None]] = {
    "speed": compare_speed,
    "memory": compare_memory,
}


def main() -> None:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", default=[*SECTIONS], help=", ".join(SECTIONS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="samples per step over all ranks")
    parser.add_argument("--pairs", type=int, default=6, help="of a block of each layout")
    parser.add_argument("--steps", type=int, default=12, help="per block")
    parser.add_argument("--settle", type=int, default=4, help="steps before those")
    options = parser.parse_args()
    world = kaitian_mpi.init(devices="cpu", emulate_kinds="gpu,gpu,mlu,mlu")
    if world.rank == 0:
        task = make_task(options.width, options.layers)
        parameters = sum(p.numel() for p in task.model.parameters())
        print(f"{world.size} ranks of 2 kinds (emulated), {parameters / 1e6:.1f} M parameters")
    for name in options.sections:
        SECTIONS[name](world, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
