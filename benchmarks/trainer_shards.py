"""Compares DDP whose gradients are summed to owners with stock DDP, alternating in one run.

    mpirun -np 2 --map-by core --bind-to core python benchmarks/trainer_shards.py [speed] [save]

Prints, with shares 3:1 of a GPT's gradients and optimizer state:

    speed    the step of `kaitian-run --layout shard` / that of stock DDP over kaitian, with whole
             and with sharded parameters: the median over the pairs of neighboring steps, and the
             quartiles
    save     the seconds in which rank 0 alone saves an optimizer's state that others own in part /
             those for a state of its own

World rank 0 prints.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from shared.comparison import in_turns, quartiles, ratios
from shared.gpt import GPT, loss_of, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kaitian_mpi import init
from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.integrations.shard import trainer_shards
from kaitian_mpi.integrations.shard.budget import LayoutSettings, Owners
from kaitian_mpi.integrations.shard.install import Installed
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.shard.memory_budget import is_worth_sharding

VOCABULARY, LENGTH = 256, 32
SHARES = 3.0, 1.0, 2.0, 1.0


class Trainer:
    """A GPT in DDP, and its optimizer."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(GPT(VOCABULARY, LENGTH, options.width, options.layers))
        self.optimizer = make_optimizer(self.model)
        self.batch = torch.randint(VOCABULARY, (options.batch, LENGTH + 1))

    def step(self) -> float:
        """Train one step and return the seconds of the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss_of(self.model, self.batch).backward()
        self.optimizer.step()
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def save(self) -> float:
        """Let rank 0 save the optimizer's state, and return its seconds."""
        dist.barrier()
        began = time.perf_counter()
        if dist.get_rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(self.optimizer.state_dict(), Path(folder, "optimizer.pt"))
        seconds = torch.tensor(time.perf_counter() - began)
        dist.broadcast(seconds, 0)
        return seconds.item()


def make_trainers(world: World, options: argparse.Namespace) -> dict[str, Trainer]:
    """Return a trainer in stock DDP, and those with whole and with sharded parameters."""
    trainers = {"stock": Trainer(options)}
    trainers["stock"].step()  # which makes its optimizer's state
    Installed(world, LayoutSettings())  # until the process ends
    stock_owners = trainer_shards.find_owners
    for name, are_sharded in (("whole", False), ("sharded", True)):

        def find_owners(
            settings: LayoutSettings,
            world: World,
            model: nn.Module,
            optimizers: Sequence[Optimizer],
            are_sharded: bool = are_sharded,
        ) -> Owners:
            numbers = frozenset(
                number
                for number, parameter in enumerate(model.parameters())
                if are_sharded and is_worth_sharding(parameter)
            )
            return Owners(without_mirrors(options.shares[: world.size]), numbers, True, "")

        trainer_shards.find_owners = find_owners
        trainers[name] = Trainer(options)
        trainers[name].step()
    trainer_shards.find_owners = stock_owners
    return trainers


def main() -> None:
    """Run the comparisons; world rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", default=["speed", "save"], help="speed, save")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12, help="12 of width 256: 10 M parameters")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the ranks")
    options = parser.parse_args()

    world = init()
    trainers = make_trainers(world, options)
    parameters = sum(p.numel() for p in trainers["stock"].model.parameters())
    if world.rank == 0:
        print(f"{world.size} ranks, {parameters / 1e6:.1f} M parameters")
    for section in options.sections:
        calls = {
            name: trainer.step if section == "speed" else trainer.save
            for name, trainer in trainers.items()
        }
        seconds = in_turns(calls, options.pairs if section == "speed" else 5)
        for name in ("whole", "sharded") if world.rank == 0 else ():
            ratio = quartiles(ratios(seconds[name], seconds["stock"]))
            median = statistics.median(seconds[name])
            print(f"{section}: {name} / stock {ratio}, {median:.3f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
