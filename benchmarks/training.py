"""Compares `Training` with a bare loop over stock DDP, alternating in one run, on a small GPT.

    mpirun -np 2 --map-by core --bind-to core python benchmarks/training.py --slowdown 3
    mpirun -np 2 --map-by core --bind-to core python benchmarks/training.py

With --slowdown the last rank is that many times slower (emulated), the bare loop gives every rank
equal shares, and the ratio is that of the samples per second: what load-adaptive shares gain.
Without it the shares are equal in both, and the ratio is that of the step times: what `Training`
costs. --shares gives bare loops other shares, such as the best ones known: where the cores' own
speed changes, these show how much of the gain the machine allowed to shares that stay.
--open measures the open form. World rank 0 prints medians and quartiles over blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from shared.comparison import in_turns, quartiles, ratios
from shared.gpt import GPT, loss_of, make_optimizer

import kaitian_mpi
from kaitian_mpi.devices.pace import Pace
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import sleeping_barrier

VOCABULARY, LENGTH = 64, 64


def make_model() -> GPT:
    """Return the model that both train."""
    return GPT(VOCABULARY, LENGTH, width=128, layers=4)


class Bare:
    """A loop over stock DDP with fixed shares."""

    def __init__(self, world: World, data: torch.Tensor, shares: list[int], factor: float) -> None:
        torch.manual_seed(0)
        self.model = kaitian_mpi.data_parallel(make_model())
        self.optimizer = make_optimizer(self.model)
        schedule = ((0, factor),) if world.rank == world.size - 1 else ()
        self.slowdown = Pace(schedule)
        # Of the gradients it is the last that is computed: a slow rank is late for their sum.
        tokens = self.model.get_parameter("module.tokens.weight")
        tokens.register_hook(lambda gradient: self.slowdown.catch_up())
        self.sampler = kaitian_mpi.LoadAdaptiveSampler(range(len(data)), shares, world.rank)
        self.data, self.indices = data, iter(self.sampler)

    def step(self) -> None:
        """Train one step."""
        batch = self.data[next(self.indices)]
        self.slowdown.start()
        loss_of(self.model, batch).backward()
        self.slowdown.start()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.slowdown.catch_up()


def open_steps(training: kaitian_mpi.Training) -> Iterator[None]:
    """Train a step per iteration, in the open form."""
    for batch in training.batches():
        training.backward(loss_of(training.model, batch))
        training.step()
        yield


def seconds_per_step(world: World, step: object, count: int) -> float:
    """Return the slowest rank's seconds per step over `count` steps. Collective."""
    sleeping_barrier(world.comm)
    began = time.perf_counter()
    for _ in range(count):
        step()  # type: ignore[operator]
    return max(gather_values(world.comm, time.perf_counter() - began)) / count


def show(ours: list[float], theirs: list[float], shares: str, is_slowed: bool) -> None:
    """Print medians and quartiles of seconds per step: of `Training`, and of a bare loop."""
    found = ratios(theirs, ours) if is_slowed else ratios(ours, theirs)
    what = f"samples/s, Training / {shares}" if is_slowed else "step, Training / bare loop"
    step, bare_step = (1e3 * statistics.median(times) for times in (ours, theirs))
    extra = statistics.median(1e3 * (a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{what} {quartiles(found)}")
    print(f"step {step:.1f} ms, bare {bare_step:.1f} ms, difference {extra:+.2f} ms")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slowdown", type=float, default=1.0, help="of the last rank (emulated)")
    parser.add_argument("--open", action="store_true", help="measure the open form")
    parser.add_argument("--batch", type=int, default=32, help="samples per step over all ranks")
    parser.add_argument(
        "--shares", nargs="+", default=["equal"], help="of a bare loop each, such as equal 24,8"
    )
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6, help="per block")
    parser.add_argument("--settle", type=int, default=25, help="steps before the first block")
    options = parser.parse_args()

    world = kaitian_mpi.init()
    torch.manual_seed(1)
    data = torch.randint(VOCABULARY, (100_000, LENGTH + 1))
    torch.manual_seed(0)
    is_slowed = options.slowdown > 1
    task = kaitian_mpi.Task(
        model=make_model(),
        optimizer=make_optimizer,
        data=data,
        loss=None if options.open else loss_of,
        clip_norm=1.0,
    )
    equal = [options.batch // world.size] * world.size
    loops = {
        text: Bare(
            world,
            data,
            equal if text == "equal" else [int(share) for share in text.split(",")],
            options.slowdown,
        )
        for text in options.shares
    }
    with kaitian_mpi.Training(
        task,
        global_batch_size=options.batch,
        balance="adaptive" if is_slowed else "off",
        emulate_slowdown=f"{world.size - 1}:{options.slowdown}" if is_slowed else "",
        check_every=0,
        log_interval=1e9,
    ) as training:
        steps = open_steps(training) if options.open else iter(training)
        for _ in range(options.settle):
            next(steps)
        for bare in loops.values():
            seconds_per_step(world, bare.step, 2)
        turns = {"": partial(next, steps), **{text: bare.step for text, bare in loops.items()}}
        calls = {
            text: partial(seconds_per_step, world, step, options.steps)
            for text, step in turns.items()
        }
        others = in_turns(calls, options.blocks, warm_up=0)
        ours = others.pop("")
        last = training.last_step
        assert last is not None
        adapted = last.batch_sizes
    if world.rank == 0:
        form = "open" if options.open else "closed"
        emulated = f", one {options.slowdown:g}x slower (emulated)" if is_slowed else ""
        print(f"{form} form, {world.size} ranks{emulated}, shares {adapted}")
        for text, theirs in others.items():
            show(ours, theirs, f"{text} shares" if text == "equal" else f"shares {text}", is_slowed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
