"""Tensors that MPI cannot access are staged through host memory, on every path."""

import fake_accelerator
import pytest
import torch
import torch.distributed as dist
from fake_accelerator import on_device, to_host, values

from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS
from kaitian_mpi.distributed.relay.relay import Relay


@pytest.fixture(autouse=True)
def accelerator():
    fake_accelerator.install()
    fake_accelerator.copied_elements.clear()


def test_the_host_cannot_touch_the_fake_accelerators_memory():
    tensor = on_device(torch.ones(3))
    with pytest.raises((RuntimeError, TypeError)):
        tensor.numpy()
    with pytest.raises(RuntimeError, match="mixes host memory"):
        tensor + torch.ones(3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str
)
@pytest.mark.parametrize("length", [1, 1_000, 3_000_001])
def test_all_reduce(world, algorithm, dtype, length):
    dist.group.WORLD.algorithm = algorithm
    values = torch.arange(length) % 13
    tensor = on_device((values * (world.rank + 1)).to(dtype))
    dist.all_reduce(tensor)
    expected = values * (world.size * (world.size + 1) // 2)
    assert torch.equal(to_host(tensor), expected.to(dtype))
    if world.size > 1:
        assert sum(fake_accelerator.copied_elements) >= 2 * length


@pytest.mark.ranks(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_kind_on_the_accelerator_and_one_on_the_host(world, algorithm):
    dist.group.WORLD.algorithm = algorithm
    own = torch.full((5_000,), float(world.rank + 1))
    on_accelerator = world.info.kind == "odd"
    tensor = on_device(own) if on_accelerator else own
    dist.all_reduce(tensor)
    result = to_host(tensor) if on_accelerator else tensor
    assert torch.equal(result, torch.full((5_000,), world.size * (world.size + 1) / 2))


def test_broadcast_and_gather(world):
    tensor = on_device(torch.full((3, 4), float(world.rank)))
    dist.broadcast(tensor, world.size - 1)
    assert torch.equal(to_host(tensor), torch.full((3, 4), float(world.size - 1)))
    own = on_device(torch.tensor([float(world.rank), 0.5]))
    parts = [on_device(torch.zeros(2)) for _ in range(world.size)]
    dist.all_gather(parts, own)
    assert [to_host(part).tolist() for part in parts] == [[r, 0.5] for r in range(world.size)]


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("place", [on_device, torch.Tensor.clone], ids=["accelerator", "host"])
def test_the_relay_exchanges_every_chunk_and_copies_it_back(pieces, place):
    length = 100 * pieces - 1
    tensor = place(torch.arange(length, dtype=torch.float32))
    sizes = []

    def exchange(host: torch.Tensor) -> None:
        assert host.is_cpu
        sizes.append(host.numel())
        host.mul_(2)

    Relay().exchange_chunks(tensor.split(100), exchange)
    assert torch.equal(values(tensor), torch.arange(length, dtype=torch.float32) * 2)
    assert sizes == [100] * (pieces - 1) + [99]
