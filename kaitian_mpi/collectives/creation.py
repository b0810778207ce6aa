"""Making a process group for the ranks that torch names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.launch import read_launch
from kaitian_mpi.mpi.rendezvous import world_of_size
from kaitian_mpi.mpi.topology import positions, split_by_kind, subset
from kaitian_mpi.mpi.world import World, current_world

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.collectives.dispatch import OwnDevice
    from kaitian_mpi.collectives.process_group import KaitianProcessGroup


def create(options: Any, _: Any = None) -> KaitianProcessGroup:
    """Make the process group that torch asks for. Collective over the group's ranks.

    Raises:
        UserError: MPI has another number of ranks than torch was told, or the process's first
            group over `kaitian` is not of all ranks.
    """
    is_default = not options.global_ranks_in_group
    world, comm = _default(options) if is_default else _subgroup(options)
    # The import would start MPI, and its settings must be made before.
    from kaitian_mpi.collectives.process_group import KaitianProcessGroup

    places = positions(comm, world.comm)
    comms = split_by_kind(comm, [world.kinds[rank] for rank in places])
    own = _own_device(world, [places[rank] for rank in comms.own.ranks])
    return KaitianProcessGroup(options.store, comms, own, str(options.group_id), options.timeout)


def _own_device(world: World, group: list[int]) -> OwnDevice:
    """Return this rank's device; `group` are the ranks of its kind, or of its emulated label."""
    from kaitian_mpi.collectives.dispatch import OwnDevice

    alike = len({torch.device(world.infos[rank].device).type for rank in group}) == 1
    has_vendor = alike and world.device_kind.vendor_backend is not None
    return OwnDevice(world.device, world.device_kind, has_vendor)


def _default(options: Any) -> tuple[World, MPI.Intracomm]:
    """Return a communicator of all ranks, in the script's order, which may not be MPI's."""
    world = world_of_size(options.group_size)
    ranks = gather_values(world.comm, options.group_rank)
    if sorted(ranks) != list(range(world.size)):
        raise AgreedError(
            f"found the ranks {ranks}, by MPI's order, needed each of 0 to {world.size - 1} once; "
            "give every process a rank of its own"
        )
    return world, cast("MPI.Intracomm", world.comm.Split(0, options.group_rank))


def _subgroup(options: Any) -> tuple[World, MPI.Intracomm]:
    members = list(options.global_ranks_in_group)
    world = current_world() or _start_under_another_backend(len(members))
    from kaitian_mpi.collectives.process_group import KaitianProcessGroup

    default = dist.group.WORLD
    base = world.comm
    if isinstance(default, KaitianProcessGroup):
        base = default.comms.world
    else:  # its ranks may be in another order than MPI's, of which it knows nothing
        options.store.set(f"mpi/{options.group_rank}", str(world.rank))
        keys = [f"mpi/{rank}" for rank in range(len(members))]
        members = [int(rank) for rank in options.store.multi_get(keys)]
    return world, subset(base, members, str(options.group_id))


def _start_under_another_backend(group_size: int) -> World:
    """Return the world for a first group over `kaitian` where the default group is gloo's, say."""
    job_size = max(read_launch(os.environ).world_size, dist.get_world_size())
    if group_size < job_size:
        # torch asks the members alone, and all ranks must start MPI together.
        raise UserError(
            f"found a group of {group_size} ranks as the first over kaitian, needed one of all "
            f'{job_size}, with which MPI starts; call new_group(backend="kaitian") before it'
        )
    return world_of_size(group_size)
