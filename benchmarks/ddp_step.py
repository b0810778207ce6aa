"""Compares the step time of stock DDP over gloo and over kaitian, alternating in one run.

    mpirun -np 2 python benchmarks/ddp_step.py
    mpirun -np 4 python benchmarks/ddp_step.py --emulate-kinds gpu,gpu,mlu,mlu

Prints the ratio kaitian / gloo: the median over the pairs of neighboring steps, and the quartiles.
Which of the two comes first changes from pair to pair.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from shared.comparison import in_turns, quartiles, ratios
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi import init
from kaitian_mpi.recipes.models import MobileNetV2
from kaitian_mpi.train.measure.allreduce import choose_algorithm


class Trainer:
    """A model, its optimizer, and stock DDP over one process group."""

    def __init__(self, group: dist.ProcessGroup, batch: int) -> None:
        torch.manual_seed(0)
        model = MobileNetV2(10).to(memory_format=torch.channels_last)
        self.model = DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,))

    def step(self) -> float:
        """Train one step and return its seconds."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def main() -> None:
    """Run the comparison; world rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps")
    parser.add_argument("--emulate-kinds", default="")
    options = parser.parse_args()

    world = init(emulate_kinds=options.emulate_kinds)
    group = dist.group.WORLD
    sizes = [sum(p.numel() for p in MobileNetV2(10).parameters())]
    choose_algorithm(group, "auto", sizes, torch.device("cpu"))
    trainers = {
        "gloo": Trainer(dist.new_group(backend="gloo"), options.batch),
        "kaitian": Trainer(group, options.batch),
    }
    calls = {name: trainer.step for name, trainer in trainers.items()}
    seconds = in_turns(calls, options.pairs)
    if world.rank == 0:
        emulated = " (emulated kinds)" if options.emulate_kinds else ""
        print(
            f"{world.size} ranks in {len(world.groups)} group(s){emulated}, {group.host.algorithm}"
        )
        for name, times in seconds.items():
            print(f"{name:8} median step {statistics.median(times):.4f} s")
        print(f"kaitian / gloo {quartiles(ratios(seconds['kaitian'], seconds['gloo']))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
