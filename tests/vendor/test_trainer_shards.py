"""Layout shard under DistributedDataParallel, on ranks of which some have accelerators."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import mostly_in_several_kinds

from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.integrations.shard import trainer_shards
from kaitian_mpi.integrations.shard.budget import LayoutSettings, Owners
from kaitian_mpi.integrations.shard.install import Installed
from kaitian_mpi.integrations.shard.script_parameters import is_sharded

SHARES = 3.0, 1.0, 2.0, 1.0
STEPS = 5


pytestmark = pytest.mark.thorough(3, 4)


@pytest.fixture
def installed(world):
    extensions = Installed(world, LayoutSettings())
    yield
    extensions.close()


def matrices(seed):
    """Return a model with two parameters that are large enough to stay on the host."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)).double()


@mostly_in_several_kinds
@pytest.mark.parametrize("begins", ["cpu", "meta"])
def test_large_parameters_stay_on_the_host_until_they_have_owners(world, device_of, begins):
    def train(model, rows, place):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4 * world.size, 128, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(place(x[rows].contiguous())).square().mean().backward()
            optimizer.step()

    extensions = Installed(world, LayoutSettings(shards_parameters=True))
    is_on_meta = begins == "meta" and world.rank > 0
    own, reference = matrices(world.rank), matrices(0)
    with torch.device("meta" if is_on_meta else "cpu"):
        model = matrices(world.rank)
    before, _ = world.device_kind.tensor_bytes(world.device_index)
    model.to(world.device)
    if is_on_meta:
        assert model[0].weight.is_meta
    else:
        after, _ = world.device_kind.tensor_bytes(world.device_index)
        assert model[0].weight.device == model[0].bias.device == world.device
        assert after - before < model[0].weight.nbytes
        x = torch.ones(2, 128, dtype=torch.float64)
        torch.testing.assert_close(model(device_of(x)).cpu(), own(x))  # copied to the device
    ddp = DistributedDataParallel(model)
    after, _ = world.device_kind.tensor_bytes(world.device_index)
    assert after - before < model[0].weight.nbytes
    assert model[0].weight.device == model[0].bias.device == world.device
    train(ddp, slice(world.rank, None, world.size), device_of)
    train(reference, slice(None), torch.clone)  # rank 0's values were given to all
    assert is_sharded(model[0].weight)
    assert is_sharded(model[2].weight)
    for (name, value), other in zip(
        model.state_dict().items(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(value.cpu(), other.detach(), rtol=0, atol=1e-12, msg=name)
    extensions.close()


@mostly_in_several_kinds
@pytest.mark.parametrize("are_sharded", [False, True])
def test_a_loop_trains_as_one_process_does(world, installed, device_of, monkeypatch, are_sharded):
    def find_owners(settings, world, model, optimizers):
        numbers = range(len([*model.parameters()])) if are_sharded else ()
        return Owners(without_mirrors(SHARES[: world.size]), frozenset(numbers), True, "")

    def train(model, rows, place):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(12 * world.size, 13, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(place(x[rows].contiguous())).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        return optimizer

    monkeypatch.setattr(trainer_shards, "find_owners", find_owners)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 64), nn.Tanh(), nn.Linear(64, 7)).double()
    reference = copy.deepcopy(model)
    model.to(world.device)
    ddp = DistributedDataParallel(model)
    optimizer = train(ddp, slice(world.rank, None, world.size), device_of)
    expected = train(reference, slice(None), torch.clone)
    for (name, value), other in zip(
        model.state_dict().items(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(value.cpu(), other.detach(), rtol=0, atol=1e-12, msg=name)
    states = optimizer.state_dict()["state"]
    for place, state in expected.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(states[place][name].cpu(), value, rtol=0, atol=1e-12)
