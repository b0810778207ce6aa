"""Making a process group for the ranks that torch names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from kaitian_mpi.backend.meeting import Party, clear, meet
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.job_store import finished_ranks, job_store
from kaitian_mpi.mpi.rendezvous import check_world_size, world_with_size_check
from kaitian_mpi.mpi.retired import free_retired_comms
from kaitian_mpi.mpi.topology import split_by_kind, subset, translate_ranks
from kaitian_mpi.mpi.world import World, current_world
from kaitian_mpi.runtime.launcher import read_launch

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.backend.process_group import KaitianProcessGroup
    from kaitian_mpi.collectives.vendor import OwnDevice


def create(options: Any, _: Any = None) -> KaitianProcessGroup:
    """Make the process group that torch asks for. Collective over the group's ranks.

    Raises:
        UserError: MPI has another number of ranks than torch was told, or the process's first
            group over `kaitian` is not of all ranks.
        CollectiveError: a rank did not come within the group's time-out, or has left the job.
    """
    is_default = not options.global_ranks_in_group
    world, comm, unique = _default(options) if is_default else _subgroup(options)
    # The import would start MPI, and its settings must be made before.
    from kaitian_mpi.backend.process_group import KaitianProcessGroup

    clear(options.store, _party(options, ""))  # to make a communicator all came out of the meeting
    free_retired_comms()
    places = translate_ranks(comm, world.comm)
    comms = split_by_kind(comm, [world.kinds[rank] for rank in places])
    own = _own_device(world, [places[rank] for rank in comms.own.ranks])
    group_store = job_store().view(f"group {unique}")
    name = str(options.group_id)
    return KaitianProcessGroup(options.store, group_store, comms, own, name, options.timeout)


def _own_device(world: World, group: list[int]) -> OwnDevice:
    """Return this rank's device; `group` are the ranks of its kind, or of its emulated label."""
    from kaitian_mpi.collectives.vendor import OwnDevice

    alike = len({torch.device(world.infos[rank].device).type for rank in group}) == 1
    has_vendor = alike and world.device_kind.vendor_backend is not None
    return OwnDevice(world.device, world.device_kind, has_vendor)


def _default(options: Any) -> tuple[World, MPI.Intracomm, str]:
    """Return a communicator of all ranks, in the script's order, which may not be MPI's."""
    check_world_size(options.group_size)
    # Before MPI starts, where it has not: that waits for every rank, too.
    world = current_world()
    unique = _meet(options, "init_process_group", lambda _: _departed(world))
    world = world_with_size_check(options.group_size)
    ranks = gather_values(world.comm, options.group_rank)
    if sorted(ranks) != list(range(world.size)):
        raise AgreedError(
            f"found the ranks {ranks}, by MPI's order, needed each of 0 to {world.size - 1} once; "
            "give every process a rank of its own"
        )
    return world, cast("MPI.Intracomm", world.comm.Split(0, options.group_rank)), unique


def _subgroup(options: Any) -> tuple[World, MPI.Intracomm, str]:
    members = list(options.global_ranks_in_group)
    world, default = current_world(), dist.group.WORLD
    if world is None:
        _check_all_ranks(len(members))
    comms = getattr(default, "comms", None)  # of a default group over kaitian
    if world is not None and comms is not None:
        places = translate_ranks(comms.world, world.comm)

        def departed(missing: list[int]) -> list[int]:
            gone = _departed(world)
            return [rank for rank in missing if places[members[rank]] in gone]

        unique = _meet(options, "new_group", departed)
        return world, subset(comms.world, members, str(options.group_id)), unique
    # The default group's ranks may be in another order than MPI's, of which it knows nothing.
    unique = _meet(options, "new_group", lambda _: [])
    world = world or world_with_size_check(len(members))
    options.store.set(f"mpi/{options.group_rank}", str(world.rank))
    keys = [f"mpi/{rank}" for rank in range(len(members))]
    members = [int(rank) for rank in options.store.multi_get(keys)]
    return world, subset(world.comm, members, str(options.group_id)), unique


def _meet(options: Any, name: str, departed: Callable[[list[int]], list[int]]) -> str:
    return meet(options.store, _party(options, name), departed)


def _party(options: Any, name: str) -> Party:
    return Party(name, options.group_rank, options.group_size, options.timeout)


def _departed(world: World | None) -> list[int]:
    return [] if world is None else finished_ranks(world.comm)


def _check_all_ranks(group_size: int) -> None:
    """Refuse a first group over `kaitian` of a part of the ranks, beside another backend's."""
    job_size = max(read_launch(os.environ).world_size, dist.get_world_size())
    if group_size < job_size:
        # torch asks the members alone, and all ranks must start MPI together.
        raise UserError(
            f"found a group of {group_size} ranks as the first over kaitian, needed one of all "
            f'{job_size}, with which MPI starts; call new_group(backend="kaitian") before it'
        )
