"""Uneven shares in a script of one's own: fast ranks take more samples, the gradient stays exact.

mpirun -np 2 python examples/uneven_shares.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import kaitian_mpi


def main() -> None:
    """Train a small classifier for 3 epochs."""
    world = kaitian_mpi.init()
    torch.manual_seed(0)
    inputs = torch.randn(1_000, 20)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())

    # Rank 0 takes 48 samples of each step, the others 16.
    batch_sizes = [48 if rank == 0 else 16 for rank in range(world.size)]
    sampler = kaitian_mpi.LoadAdaptiveSampler(dataset, batch_sizes, world.rank)
    loader = DataLoader(dataset, batch_sampler=sampler)

    model = DistributedDataParallel(nn.Linear(20, 2).to(world.torch_device))
    gradients = kaitian_mpi.WeightedSum()
    gradients.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        left = len(dataset)
        for x, y in loader:
            in_this_step = min(left, sampler.global_batch_size)
            left -= in_this_step
            gradients.weight = len(y) / in_this_step
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(x.to(world.torch_device)), y.to(world.torch_device)
            )
            loss.backward()
            optimizer.step()
        if world.rank == 0:
            print(f"epoch {epoch + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
