"""Compares the step time of GradientReducer and of DDP with WeightedSum, alternating in one run.

    mpirun -np 2 python benchmarks/reducer.py

Prints the ratio GradientReducer / DDP and the difference: the median over the pairs of neighboring
steps, and the quartiles. Which of the two comes first changes from pair to pair.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from shared.comparison import in_turns, quartiles, ratios
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi import WeightedSum, init
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.recipes.models import MobileNetV2


def small_layers() -> nn.Module:
    """Return a model of 150 small parameters."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(75)))


class Trainer(ABC):
    """A model and its optimizer; subclasses compute and sum the gradients."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, weight: float) -> None:
        self.model, self.inputs, self.weight = copy.deepcopy(model), inputs, weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def step(self) -> float:
        """Train one step and return the slowest rank's seconds. Collective."""
        dist.barrier()
        start = time.perf_counter()
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    @abstractmethod
    def gradients(self) -> None:
        """Leave the sum over the ranks in the parameters' gradients."""


class DDP(Trainer):
    """As `data_parallel` does it, or a script with DDP."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, weight: float) -> None:
        super().__init__(model, inputs, weight)
        self.ddp = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        self.sums = WeightedSum()
        self.sums.attach(self.ddp)

    def gradients(self) -> None:
        """Let DDP's hook do it."""
        self.sums.weight = self.weight
        self.ddp(self.inputs).square().mean().backward()
        sums = [p.grad.sum() for p in self.model.parameters() if p.grad is not None]
        assert torch.stack(sums).isfinite().all()


class Plain(Trainer):
    """The model as it is."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, weight: float) -> None:
        super().__init__(model, inputs, weight)
        self.reducer = GradientReducer(self.model)

    def gradients(self) -> None:
        """Let a reducer do it."""
        self.reducer.arm(self.weight)
        self.model(self.inputs).square().mean().backward()
        self.reducer.finish()
        assert self.reducer.is_finite()


def compare(name: str, model: nn.Module, inputs: torch.Tensor, pairs: int, rank: int) -> None:
    """Time both, alternating. Collective; rank 0 prints."""
    weight = 1 / dist.get_world_size()
    makers: dict[str, Callable[..., Trainer]] = {"DDP": DDP, "GradientReducer": Plain}
    trainers = {label: make(model, inputs, weight) for label, make in makers.items()}
    seconds = in_turns({label: made.step for label, made in trainers.items()}, pairs, warm_up=3)
    if rank:
        return
    ours, ddp = seconds["GradientReducer"], seconds["DDP"]
    more = [1e3 * (one - other) for one, other in zip(ours, ddp, strict=True)]
    print(
        f"{name}, DDP's step {1e3 * statistics.median(ddp):.2f} ms, {pairs} pairs: "
        f"GradientReducer / DDP {quartiles(ratios(ours, ddp))}, "
        f"difference in ms {quartiles(more, '+.3f')}",
        flush=True,
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="images per rank")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps of MobileNetV2")
    options = parser.parse_args()

    rank = init().rank
    torch.manual_seed(0)
    images = torch.randn(options.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    compare("MobileNetV2", MobileNetV2(10), images, options.pairs, rank)
    compare("150 small parameters", small_layers(), torch.randn(4, 32), 10 * options.pairs, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
