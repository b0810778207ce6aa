"""`init_process_group("kaitian", init_method="mpi://")`: rank, size and store come from MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.job_store import open_session
from kaitian_mpi.mpi.world import World, current_world, join_world
from kaitian_mpi.runtime.abort import guard_script
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.lifecycle import start_mpi

if TYPE_CHECKING:
    from kaitian_mpi.mpi.store import MPIStore

DEFAULT_TIMEOUT = timedelta(minutes=30)


def world_or_join() -> World:
    """Return this process's world, starting MPI and joining it where nobody has.

    Collective the first time.
    """
    world = current_world()
    if world is None:
        guard_script()
        world = join_world(start_mpi())
    return world


def world_of_size(size: int | None) -> World:
    """Return the world, joined where nobody has, of as many ranks as torch was told.

    Collective the first time, over all ranks that mpirun started.

    Args:
        size: the number of ranks that the script or its environment gives; None: it gives none.

    Raises:
        UserError: MPI has another number of ranks.
    """
    check_launched(size)
    world = world_or_join()
    _check_size(world.size if size is None else size, world.size)
    return world


def check_launched(size: int | None) -> None:
    """Check the number of ranks that torch was told, before MPI starts.

    Starting it would wait for ranks that may never come.

    Raises:
        UserError: mpirun started another number of ranks.
    """
    launched = read_launch(os.environ).world_size
    if size is not None and launched > 1 and current_world() is None:
        _check_size(size, launched)


def rendezvous(
    rank: int | None = None, size: int | None = None, timeout: timedelta | None = None
) -> Iterator[tuple[MPIStore, int, int]]:
    """Yield a store, this rank and the number of ranks, as torch asks of a rendezvous handler.

    The first time it is collective. Later it waits for nobody, and every rank comes here as often;
    after a `destroy_process_group` a program may do it again, with a new store.

    Args:
        rank: this rank's number where the script gives one; None: the one that MPI gave it.
        size: the number of ranks where the script gives it.
        timeout: how long the store waits for a key.

    Raises:
        UserError: MPI has another number of ranks than the script, or than WORLD_SIZE where
            there is no mpirun.
    """
    if size is None and read_launch(os.environ).world_size == 1:
        size = _told_by_another_launcher()
    world = world_of_size(size)
    store = open_session(timeout or DEFAULT_TIMEOUT)
    yield store, world.rank if rank is None else rank, world.size


def _told_by_another_launcher() -> int | None:
    """Return the number of ranks that torchrun, say, has started: each would be a job of one."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() and int(size) > 1 else None


def _check_size(given: int, ranks: int) -> None:
    if given == ranks:
        return
    if ranks == 1:
        raise UserError(
            f"found a world size of {given}, but MPI has this rank alone: it was not started by "
            f"mpirun; start the job with mpirun -np {given} in the place of another launcher"
        )
    raise UserError(
        f"found a world size of {given}, needed {ranks}, the number of ranks that mpirun started; "
        f'give world_size={ranks}, or none with init_method="mpi://"'
    )
