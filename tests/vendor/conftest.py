"""Run inside one mpirun: ``mpirun -np N python -m pytest -s tests/vendor``.

Some ranks have a fake accelerator, whose kind has a collective library as NVIDIA's has NCCL; the
kinds are added by entry points, as other packages add theirs. Every test runs in worlds of several
layouts, one after the other, in which the library keeps the contracts of several vendors; see
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
from mpi_session import LAUNCH

import kaitian_mpi
from kaitian_mpi.mpi.world import World

# Devices, and the library. Each library serves a group of all ranks, and groups beside others.
LAYOUTS = {
    1: [("vendor", "nccl")],
    2: [
        ("vendor,cpu", "nccl"),
        ("auto", "mccl"),
        pytest.param(("vendor,vendor", "xccl"), marks=pytest.mark.thorough),
    ],
    3: [("vendor,cpu,vendor", "xccl"), ("vendor,vendor,vendor", "hccl")],
    4: [
        ("vendor,cpu,vendor,vendor2", "hccl"),
        pytest.param(("vendor,vendor2,vendor2,vendor", "mccl"), marks=pytest.mark.thorough),
        pytest.param(("vendor,vendor,vendor,vendor", "nccl"), marks=pytest.mark.thorough),
    ],
}


@pytest.fixture(scope="module", params=LAYOUTS[LAUNCH.world_size], ids="-".join)
def world(request: pytest.FixtureRequest) -> World:
    devices, library = request.param
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
