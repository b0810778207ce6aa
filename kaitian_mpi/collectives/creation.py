"""Making a process group for the ranks that torch names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from kaitian_mpi.collectives.process_group import KaitianProcessGroup
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi import rendezvous
from kaitian_mpi.mpi.topology import positions, split_by_kind, subset

if TYPE_CHECKING:
    from mpi4py import MPI


def create(options: Any, _: Any = None) -> KaitianProcessGroup:
    """Make the process group that torch asks for. Collective over the group's ranks."""
    world = rendezvous.world_or_join()
    if options.group_size > world.size:
        raise UnsupportedError(
            f"a group of {options.group_size} ranks in an MPI world of {world.size}; start the "
            "job with mpirun, one process per rank"
        )
    comm = _communicator(world.comm, options)
    kinds = [world.kinds[rank] for rank in positions(comm, world.comm)]
    comms = split_by_kind(comm, kinds)
    return KaitianProcessGroup(options.store, comms, str(options.group_id), options.timeout)


def _communicator(world: MPI.Intracomm, options: Any) -> MPI.Intracomm:
    members = list(options.global_ranks_in_group)
    if not members:  # the default group; its ranks may be in another order than MPI's
        return cast("MPI.Intracomm", world.Split(0, options.group_rank))
    default = dist.group.WORLD
    base = default.comms.world if isinstance(default, KaitianProcessGroup) else world
    return subset(base, members, str(options.group_id))
