"""From a bare process to a ready torch.distributed."""

from __future__ import annotations

import torch.distributed as dist

from kaitian_mpi.collectives import BACKEND, SCHEME, autoload
from kaitian_mpi.mpi.guard import guard_script
from kaitian_mpi.mpi.runtime import start_mpi
from kaitian_mpi.mpi.world import World, join_world


def init(devices: str = "auto", emulate_kinds: str = "") -> World:
    """Start MPI, choose this rank's device, and initialise torch.distributed over `kaitian`.

    Collective over all ranks that mpirun started; without mpirun, a job of one rank.

    Args:
        devices: `auto`, `cpu`, or a list by local rank such as `cuda:0,cuda:1,cpu`.
        emulate_kinds: labels for CPU ranks by world rank, such as `gpu,gpu,mlu,mlu`.

    Raises:
        UserError: a device is missing, a host has more ranks than devices, or there is no MPI.
    """
    guard_script()
    world = join_world(start_mpi(), devices, emulate_kinds)
    autoload.register()
    dist.init_process_group(BACKEND, init_method=f"{SCHEME}://")
    return world
