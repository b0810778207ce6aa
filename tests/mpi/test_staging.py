"""Tensors that MPI cannot access are staged through host memory, on every path."""

import fake_accelerator
import pytest
import torch
import torch.distributed as dist
from fake_accelerator import on_device, to_host

from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS


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
