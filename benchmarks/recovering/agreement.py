"""Measures the cost per step of being able to recover from the loss of a rank.

    PYTHONPATH=benchmarks mpirun --with-ft ulfm -np 4 python benchmarks/recovering/agreement.py

Steps with and without it alternate within one run. World rank 0 prints a line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from shared.loops import timed
from trainers import endless, make_config, make_loop

import kaitian_mpi
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.ulfm import agree
from kaitian_mpi.train.membership import Membership

WARM_UP = 4
ALONE = 200


class Stopwatch:
    """Wraps a function and records the seconds of each call."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *arguments: object) -> None:
        """Call the function."""
        began = time.perf_counter()
        self._function(*arguments)
        self.seconds.append(time.perf_counter() - began)


def agree_alone(world: World) -> float:
    """Return the median seconds of an agreement at which all ranks arrive together. Collective."""
    seconds = []
    for _ in range(ALONE):
        sleeping_barrier(world.comm)
        began = time.perf_counter()
        agree(world.comm, True)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate blocks of steps. Collective."""
    config, membership = make_config(options.model, options.batch), Membership(world)
    commit = Stopwatch(membership.commit)
    ready, plain = make_loop(config, world, commit), make_loop(config, world)
    state = ready.state
    copy = Stopwatch(state.save)
    state.save = copy  # type: ignore[method-assign]
    steps = (endless(plain), endless(ready))
    for run in steps:
        timed(world, run, WARM_UP)
    commit.seconds.clear()
    copy.seconds.clear()
    blocks: tuple[list[float], list[float]] = ([], [])
    for number in range(options.pairs):
        for index in (0, 1) if number % 2 else (1, 0):
            blocks[index].append(timed(world, steps[index], options.steps))
    for loop in (ready, plain):
        loop.close()
    return summarise(world, blocks, commit.seconds, copy.seconds)


def summarise(
    world: World, blocks: tuple[list[float], list[float]], agreed: list[float], copied: list[float]
) -> dict[str, Any]:
    """Combine the ranks' times. Collective.

    The last rank to arrive at an agreement does not wait, so its time is the cost of agreeing. The
    times of the others include waiting, which without the agreement would happen in the next step.
    """
    per_step = list(zip(*gather_values(world.comm, agreed), strict=True))
    last = statistics.median(min(times) for times in per_step)
    usual = statistics.median(statistics.median(times) for times in per_step)
    copy = max(gather_values(world.comm, statistics.median(copied)))
    alone = max(gather_values(world.comm, agree_alone(world)))
    ratios = [ready / plain for plain, ready in zip(*blocks, strict=True)]
    step = statistics.median(blocks[0])
    return {
        "step_sec": step,
        "agree_us": 1e6 * last,
        "agree_wait_us": 1e6 * usual,
        "agree_alone_us": 1e6 * alone,
        "copy_us": 1e6 * copy,
        "percent": 100 * (last + copy) / step,
        "percent_with_waiting": 100 * (usual + copy) / step,
        "pairs": len(ratios),
        "ready_over_plain": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
        # The standard error of a median, for normally distributed errors.
        "ready_over_plain_stderr": 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios)),
    }


def main() -> None:
    """Measure; world rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=32, help="global batch")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=2, help="steps per block")
    options = parser.parse_args()
    world = kaitian_mpi.init()
    if not Membership(world).survives:
        sys.exit("this job cannot recover from a lost rank: start it with mpirun --with-ft ulfm")
    found = measure(world, options)
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
