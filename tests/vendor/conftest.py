"""Run inside one mpirun: ``mpirun -np N python -m pytest -s tests/vendor``.

Some ranks have a fake accelerator, whose kind has a collective library as NVIDIA's has NCCL; the
kinds are added by entry points, as other packages add theirs. Tests run in several worlds, one
after the other, in which the library keeps the contracts of several vendors; see `worlds.py`, and
`contracts.py`, also for a run with one of them alone.
"""

from __future__ import annotations

from collections.abc import Callable

import contracts
import pytest
import torch
import torch.distributed as dist
from fake_device import on_device
from mpi_session import *  # noqa: F403
from worlds import WORLDS

import kaitian_mpi
from kaitian_mpi.mpi.world import World


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    devices, library = request.param.split("-")
    if dist.is_initialized():
        dist.destroy_process_group()
    contracts.choose(library)
    made = kaitian_mpi.init(devices=devices)
    if devices == "auto":  # which prefers any accelerator to the CPU
        assert set(made.kinds) == {"vendor"}
    return made


@pytest.fixture
def device_of(world: World) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that creates tensors on this rank's device from host tensors."""
    return torch.clone if world.info.kind == "cpu" else on_device
