"""Run inside one mpirun: ``mpirun -np N python -m pytest -s tests/vendor``.

Some ranks have a fake accelerator, whose kind has a collective library as NVIDIA's has NCCL; the
kinds are added by entry points, as other packages add theirs. Every test runs in worlds of several
layouts, one after the other.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from mpi_session import *  # noqa: F403
from mpi_session import LAUNCH

import kaitian_mpi
from kaitian_mpi.mpi.world import World

LAYOUTS = {
    1: ["vendor"],
    2: ["vendor,cpu", "vendor,vendor2", "auto"],
    3: ["vendor,vendor2,cpu", "vendor,cpu,vendor"],
    4: [
        "vendor,cpu,vendor,vendor2",
        "vendor,vendor2,vendor2,vendor2",
        "vendor,vendor,vendor,vendor",
    ],
}


@pytest.fixture(scope="module", params=LAYOUTS[LAUNCH.world_size])
def world(request: pytest.FixtureRequest) -> World:
    if dist.is_initialized():
        dist.destroy_process_group()
    made = kaitian_mpi.init(devices=request.param)
    if request.param == "auto":  # which prefers any accelerator to the CPU
        assert set(made.kinds) == {"vendor"}
    return made
