"""Layout shard under DistributedDataParallel: plain loops against one process, in float64."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard import trainer_shards
from kaitian_mpi.integrations.shard.budget import LayoutSettings, Owners
from kaitian_mpi.integrations.shard.install import Installed

SHARES = 3.0, 1.0, 2.0, 1.0
STEPS = 6
loss_of = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Uses `some` only when it is asked for, and `never` not at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(13, 64), nn.Linear(64, 64), nn.Linear(64, 7)
        self.never, self.some = nn.Linear(64, 64), nn.Linear(64, 64)
        self.double()

    def forward(self, x, some=False):
        h = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(h + self.some(h) if some else h)


@pytest.fixture(scope="module")
def installed(world):
    extensions = Installed(world, LayoutSettings())
    yield
    extensions.close()


@pytest.fixture(params=["whole", "sharded"])
def owners(request, world, installed, monkeypatch):
    """Let ranks own unequal parts, of all parameters' values as well if these are sharded."""

    def find_owners(settings, world, model, optimizers):
        numbers = range(len([*model.parameters()])) if request.param == "sharded" else ()
        return Owners(without_mirrors(SHARES[: world.size]), frozenset(numbers), True, "")

    monkeypatch.setattr(trainer_shards, "find_owners", find_owners)
    return request.param


def batch(world, step, own):
    """Return a step's samples and labels: this rank's, or those of all ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = 12 * world.size
    x = torch.randn(rows, 13, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 7, (rows,), generator=generator)
    return (x[world.rank :: world.size], y[world.rank :: world.size]) if own else (x, y)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def compare(world, train, tolerance=1e-12):
    """Check that a loop gives the same weights, and results, in a DDP and in one process."""
    model = Net()
    reference = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    results = train(ddp, model, lambda step: batch(world, step, own=True))
    expected = train(reference, reference, lambda step: batch(world, step, own=False))
    pairs = itertools.chain(
        zip(model.parameters(), reference.parameters(), strict=True),
        zip(results or [], expected or [], strict=True),
    )
    for one, other in pairs:
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=tolerance)


def test_a_plain_loop(world, owners):
    def train(model, module, data):
        optimizer = adamw(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(step)
            loss_of(model(x), y).backward()
            optimizer.step()
        return [
            state for each in optimizer.state_dict()["state"].values() for state in each.values()
        ]

    compare(world, train)


def test_accumulation_and_clipping(world, owners):
    def train(model, module, data):
        optimizer, norms = adamw(model), []
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(3):
                x, y = data(10 * step + micro)
                adds = model is not module and micro < 2
                with model.no_sync() if adds else contextlib.nullcontext():
                    (loss_of(model(x), y) / 3).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
        return norms

    compare(world, train)


def test_a_gradient_is_not_read_in_silence(world, owners):
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    x, y = batch(world, 0, own=True)
    loss_of(ddp(x), y).backward()
    with pytest.raises(UserError, match=r"use torch\.nn\.utils\.clip_grad_norm_"):
        model.last.weight.grad.norm()
