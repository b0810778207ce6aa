"""The `mpi://` rendezvous of `init_process_group`: rank, size and store come from MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World, current_world, join_world, set_current_world
from kaitian_mpi.runtime.abort import install_abort_hook
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.lifecycle import initialize_mpi

if TYPE_CHECKING:
    from kaitian_mpi.mpi.store import MPIStore

DEFAULT_TIMEOUT = timedelta(minutes=30)


def world_with_size_check(size: int | None) -> World:
    """Return the world after checking its size against the script's. Collective the first time."""
    check_world_size(size)
    world = current_world()
    if world is None:
        install_abort_hook()
        world = set_current_world(join_world(initialize_mpi()))
    check_world_size(size, world.size)
    return world


def check_world_size(size: int | None, ranks: int = 0) -> None:
    """Check the world size given to torch; also before MPI starts, which waits for all ranks."""
    if not ranks and current_world() is None:
        launched = read_launch(os.environ).world_size
        ranks = launched if launched > 1 else 0
    if not ranks or size in (None, ranks):
        return
    if ranks == 1:
        raise UserError(
            f"the world size is {size}, but MPI has only this rank: mpirun did not start it; "
            f"start the job with mpirun -np {size} instead of another launcher"
        )
    raise UserError(
        f"the world size is {size}, but mpirun started {ranks} ranks; "
        f'pass world_size={ranks}, or omit it with init_method="mpi://"'
    )


def rendezvous(
    rank: int | None = None, size: int | None = None, timeout: timedelta | None = None
) -> Iterator[tuple[MPIStore, int, int]]:
    """Yield a new store, the rank and the world size, as torch requires. Collective at first."""
    if size is None and read_launch(os.environ).world_size == 1:
        # By e.g. torchrun, under which each rank would be a job of one.
        given = os.environ.get("WORLD_SIZE", "")
        size = int(given) if given.isdigit() and int(given) > 1 else None
    world = world_with_size_check(size)
    store = world.store.next_session(timeout or DEFAULT_TIMEOUT)
    yield store, world.rank if rank is None else rank, world.size
