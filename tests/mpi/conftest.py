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
from kaitian_mpi.train.layouts import links
from kaitian_mpi.train.layouts.pipeline import layer_timer


@pytest.fixture(scope="session")
def world() -> World:
    kinds = ",".join("even" if rank % 2 == 0 else "odd" for rank in range(LAUNCH.world_size))
    return kaitian_mpi.init(emulate_kinds=kinds)


@pytest.fixture(scope="session", autouse=True)
def _short_trials() -> Iterator[None]:
    """Time optimizers and links briefly: by any plan that follows, trainings have to be right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_timer, "_TRIAL_NUMBERS", (1 << 14, 1 << 16))
        patch.setattr(links, "_MAX_ROUNDS", 10)
        yield


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
