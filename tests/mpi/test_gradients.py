"""The gradient is that of the global batch, whatever the split and the algorithm."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi import WeightedSum
from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS

BATCHES = [7, 1, 13, 3]
STEPS = 20


def small_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
    )


def train_whole(model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(images[step]), labels[step]).backward()
        optimizer.step()


def train_shared(model, images, labels, batches, rank):
    gradients = WeightedSum()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    gradients.attach(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        # The shares change from step to step, as they do when a plan changes.
        shares = batches[step % len(batches) :] + batches[: step % len(batches)]
        start = sum(shares[:rank])
        own = slice(start, start + shares[rank])
        gradients.weight = shares[rank] / sum(shares)
        optimizer.zero_grad()
        cross_entropy(ddp(images[step, own]), labels[step, own]).backward()
        optimizer.step()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_uneven_ranks_give_the_gradient_of_the_whole_batch(world, algorithm, dtype, tolerance):
    dist.group.WORLD.algorithm = algorithm
    batches = BATCHES[: world.size]
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(STEPS, sum(batches), 3, 8, 8, generator=generator).to(dtype)
    labels = torch.randint(5, (STEPS, sum(batches)), generator=generator)
    alone = small_network().to(dtype)
    shared = copy.deepcopy(alone)
    train_whole(alone, images, labels)
    train_shared(shared, images, labels, batches, world.rank)
    for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        assert (ours - theirs).abs().max().item() <= tolerance


@pytest.mark.ranks(2)
def test_a_rank_without_samples_adds_nothing_even_if_its_gradient_is_nan(world):
    model = nn.Linear(4, 2, bias=False).double()
    nn.init.ones_(model.weight)
    gradients = WeightedSum()
    ddp = DistributedDataParallel(model)
    gradients.attach(ddp)
    gradients.weight = 1.0 if world.rank == 0 else 0.0
    value = 2.0 if world.rank == 0 else float("nan")
    ddp(torch.full((1, 4), value, dtype=torch.float64)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 4), 2.0, dtype=torch.float64))
