"""`init_process_group("kaitian", init_method="mpi://")`: rank, size and store come from MPI."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from kaitian_mpi.mpi.guard import guard_script
from kaitian_mpi.mpi.runtime import start_mpi
from kaitian_mpi.mpi.store import DEFAULT_TIMEOUT, MPIStore
from kaitian_mpi.mpi.world import World, current_world, join_world

_store: MPIStore | None = None  # torch keeps no Python reference, and needs one


def world_or_join() -> World:
    """Return this process's world, starting MPI and joining it where nobody has.

    Collective the first time.
    """
    world = current_world()
    if world is None:
        guard_script()
        world = join_world(start_mpi())
    return world


def rendezvous(timeout: timedelta | None = None) -> Iterator[tuple[MPIStore, int, int]]:
    """Yield a store, this rank and the number of ranks, as torch asks of a rendezvous handler.

    Collective. After a `destroy_process_group` a program may do it again, with a new store.
    """
    global _store
    world = world_or_join()
    if _store is not None:
        _store.close()
    _store = MPIStore(world.comm, timeout or DEFAULT_TIMEOUT)
    yield _store, world.rank, world.size
