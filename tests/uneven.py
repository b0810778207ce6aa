"""Ranks with uneven shares of the same batches train together what one process trains alone."""

import copy
from contextlib import nullcontext
from functools import partial

import torch
from collective_cases import agree, values
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi import WeightedSum, data_parallel
from kaitian_mpi.distributed.reducer import GradientReducer

SHARES = [7, 0, 13, 3]


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.ReLU(),
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


# Each way returns a function that adds the gradient of a loss, a function of the model to call.
# `weight` is this rank's part of the whole; None: more micro-batches follow.


def by_reducer(model, **options):
    reducer = GradientReducer(model, **{"bucket_caps": (2000, 4000), **options})

    def add(loss_of, weight):
        if weight is not None:
            reducer.arm(weight)
        loss_of(model).backward()
        if weight is not None:
            reducer.finish()
            assert reducer.is_finite()

    return add


def by_hook(model):
    gradients, ddp = WeightedSum(), DistributedDataParallel(model, bucket_cap_mb=0.02)
    gradients.attach(ddp)

    def add(loss_of, weight):
        gradients.weight = weight
        loss_of(ddp).backward()

    return add


def by_data_parallel(model, mode="train", **options):
    ddp = data_parallel(model, **options)
    assert type(ddp) is DistributedDataParallel
    getattr(ddp, mode)()

    def add(loss_of, weight):
        with ddp.no_sync() if weight is None else nullcontext():
            loss_of(ddp).backward()

    return add


def loss_of(images, labels, part, model):
    device = next(model.parameters()).device
    return cross_entropy(model(images.to(device)), labels.to(device)) * part


def check_like_one_process(
    world, way, *, steps=4, micro_batches=(1,), dtype=torch.float64, tolerance=1e-12, make=sgd,
    has_empty_batches=False,
):  # fmt: skip
    """Train with shares that change from step to step; in most steps a rank has no samples.

    Without empty batches, what such a rank computes is NaN and must not count. `micro_batches` are
    the numbers of those that the ranks have in turn.
    """
    shares = SHARES[: world.size]
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(steps, sum(shares), 3, 8, 8, generator=generator).to(dtype)
    labels = torch.randint(5, (steps, sum(shares)), generator=generator)
    alone = network().to(dtype)
    ours = copy.deepcopy(alone).to(world.device)
    add = way(ours)
    optimizers = [make(model) for model in (alone, ours)]
    for step in range(steps):
        loss_of(images[step], labels[step], 1, alone).backward()
        turn = step % world.size
        now = shares[turn:] + shares[:turn]
        own = now[world.rank]
        mine, wanted = images[step].split(now)[world.rank], labels[step].split(now)[world.rank]
        if not own and not has_empty_batches:
            mine, wanted = torch.full_like(images[step, :1], float("nan")), labels[step, :1]
        count = min(max(1, own), micro_batches[(world.rank + step) % len(micro_batches)])
        *first, last = zip(mine.chunk(count), wanted.chunk(count), strict=True)
        for piece in first:
            add(partial(loss_of, *piece, len(piece[0]) / len(mine)), None)
        add(partial(loss_of, *last, len(last[0]) / max(1, len(mine))), own / sum(now))
        assert agree(world, torch.cat([values(p.grad).flatten() for p in ours.parameters()]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
        assert one.device.type == world.device.type
        assert (values(one) - other).abs().max().item() <= tolerance
