"""Ranks with different releases of torch: what must agree is compared, before it does harm."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi import data_parallel
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.world import current_world, set_current_world


@pytest.fixture
def mixed_group(world):
    """A group whose last rank reports another release of torch."""
    known = current_world()
    infos = [*known.infos[:-1], replace(known.infos[-1], torch_version="2.99.0")]
    set_current_world(replace(known, infos=tuple(infos)))
    made = dist.new_group()
    set_current_world(known)
    yield made
    dist.destroy_process_group(made)


def layers():
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)), nn.Linear(600, 1))


def options(world, last):
    """Return options with which the ranks' buckets differ, as two releases' might."""
    # Without unused parameters, the first backward has one bucket.
    return {"bucket_cap_mb": 0.1 if world.rank == last else 25, "find_unused_parameters": True}


@pytest.mark.sizes(2)
def test_equal_buckets_train(world, mixed_group):
    model = data_parallel(layers(), group=mixed_group)
    model(torch.ones(2, 600)).mean().backward()
    assert model.module[4].bias.grad.item() == pytest.approx(1.0)


@pytest.mark.sizes(2)
def test_other_buckets_are_refused(world, last, mixed_group):
    message = r"division into buckets, in bytes, differs between ranks: .* on rank.*; install one"
    with pytest.raises(AgreedError, match=message):
        data_parallel(layers(), group=mixed_group, **options(world, last))
