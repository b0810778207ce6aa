"""Run inside one mpirun: ``mpirun -np N python -m pytest -s tests/mpi``.

The world's device kinds are emulated: even ranks are "even", odd ones "odd".
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from mpi_session import *  # noqa: F403
from mpi_session import LAUNCH

import kaitian_mpi
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World


@pytest.fixture(scope="session")
def world() -> World:
    kinds = ",".join("even" if rank % 2 == 0 else "odd" for rank in range(LAUNCH.world_size))
    return kaitian_mpi.init(emulate_kinds=kinds)


@pytest.fixture
def last(world: World) -> int:
    return world.size - 1


@pytest.fixture
def shared_path(world: World, tmp_path: Path) -> Path:
    """A folder that all ranks share; `tmp_path` is a rank's own."""
    return Path(gather_values(world.comm, str(tmp_path))[0])


@pytest.fixture
def one_second_group(world: World) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks with a timeout of one second."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    yield group
    dist.destroy_process_group(group)
