"""Plain DDP, from a script of one's own, over ranks of any device kind.

    mpirun -np 4 python examples/own_script.py

Two lines differ from the usual script: the import, and the call of `init`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kaitian_mpi


def main() -> None:
    """Train a small classifier for 50 steps."""
    world = kaitian_mpi.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(20, 2).to(world.torch_device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(world.rank)
    inputs = torch.randn(64, 20, device=world.torch_device)
    labels = (inputs.sum(1) > 0).long()
    for step in range(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if world.rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
