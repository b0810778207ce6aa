"""Creates a process group for the ranks that torch names, and the rendezvous `mpi://`.

Creating a communicator is a blocking MPI call without a timeout, so the ranks of a new group first
meet in the group's torch store, after which every rank knows which ranks are missing.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from kaitian_mpi.errors import AgreedError, CollectiveError, UserError, format_ranks
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.topology import free_unused_comms, split_into_groups, subset, translate_ranks
from kaitian_mpi.mpi.world import (
    World,
    current_world,
    finished_ranks,
    join_world,
    set_current_world,
)
from kaitian_mpi.runtime.abort import install_abort_hook
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.lifecycle import initialize_mpi
from kaitian_mpi.runtime.polling import nap

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.network.link import Link
    from kaitian_mpi.distributed.process_group import KaitianProcessGroup
    from kaitian_mpi.mpi.store import MPIStore

# Longer naps than elsewhere: each check is a request to a store that one thread serves, perhaps on
# another host.
_MIN_NAP_SEC = 1e-3
_MAX_NAP_SEC = 0.25
_DEPARTED_INTERVAL_SEC = 0.5  # between two checks of which missing ranks have left the job
# Keys of the store.
_COUNT = "kaitian/count"
_OUTCOME = "kaitian/outcome"

Departed = Callable[[list[int]], list[int]]
"""Returns which of the missing ranks have left the job."""


def rendezvous(
    rank: int | None = None, size: int | None = None, timeout: timedelta | None = None
) -> Iterator[tuple[MPIStore, int, int]]:
    """Yield a new store, the rank and the world size, for `mpi://`.

    Collective the first time, when MPI starts.
    """
    if size is None and read_launch(os.environ).world_size == 1:
        # torchrun, for example, sets this variable; for MPI each of its ranks is a job of one.
        variable = os.environ.get("WORLD_SIZE", "")
        size = int(variable) if variable.isdigit() and int(variable) > 1 else None
    world = _world_of_size(size)
    store = world.store.next_session(timeout)
    yield store, world.rank if rank is None else rank, world.size


def create(options: Any) -> KaitianProcessGroup:
    """Create the process group that torch requests. Collective over the group's ranks."""
    is_default = not options.global_ranks_in_group
    world, comm, unique = _default(options) if is_default else _subgroup(options)
    # Imported here because the import starts MPI, whose settings must be made before.
    from kaitian_mpi.distributed.process_group import KaitianProcessGroup

    # Every rank has left the barrier, as all of them have made the communicator.
    if options.group_size > 1:
        clear_store_barrier(options.store, options.group_rank)
    free_unused_comms()
    infos = [world.infos[rank] for rank in translate_ranks(comm, world.comm)]
    nodes = [info.node for info in infos]
    comms = split_into_groups(
        comm, [info.kind for info in infos], nodes, world.communication.group_by
    )
    links: dict[int, Link] = {}
    if len({*nodes}) > 1:
        from kaitian_mpi.distributed.network.link import links_of

        links = links_of(comms, nodes, world.communication)
    _accept_pickled_paths(info.python_version for info in world.infos)
    group = KaitianProcessGroup(options, unique, comms, links, world, infos)
    world.device_kind.calls.forget()  # waiting for the other ranks above was not computing
    return group


def _default(options: Any) -> tuple[World, MPI.Intracomm, str]:
    """Return the world, a communicator of all ranks in the script's order, and a unique name.

    Collective. The order may differ from MPI's.
    """
    _check_world_size(options.group_size)
    # The barrier comes before MPI is initialized, which would wait for every rank as well.
    world = current_world()
    unique = store_barrier(options, "init_process_group", lambda _: _departed(world))
    world = _world_of_size(options.group_size)
    ranks = gather_values(world.comm, options.group_rank)
    if sorted(ranks) != list(range(world.size)):
        raise AgreedError(
            f"the processes gave ranks {ranks} (in MPI's order), but each of 0 to "
            f"{world.size - 1} must occur once; give every process its own rank"
        )
    return world, cast("MPI.Intracomm", world.comm.Split(0, options.group_rank)), unique


def _world_of_size(size: int | None) -> World:
    """Return the world after checking its size against the script's. Collective the first time."""
    _check_world_size(size)
    world = current_world()
    if world is None:
        install_abort_hook()
        world = set_current_world(join_world(initialize_mpi()))
    _check_world_size(size, world.size)
    return world


def _check_world_size(size: int | None, ranks: int = 0) -> None:
    """Check the world size given to torch against the number of `ranks`, if that is known.

    Also called before MPI starts, without `ranks`, as MPI would wait for all of them.
    """
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


def _subgroup(options: Any) -> tuple[World, MPI.Intracomm, str]:
    """Return the world, a communicator of the group's ranks, and a unique name. Collective."""
    members = list(options.global_ranks_in_group)
    world = current_world()
    if world is None:
        _check_all_ranks(len(members))
    comms = getattr(dist.group.WORLD, "comms", None)  # None: not a default group over kaitian
    if world is not None and comms is not None:
        places = translate_ranks(comms.world, world.comm)

        def departed(missing: list[int]) -> list[int]:
            gone = _departed(world)
            return [rank for rank in missing if places[members[rank]] in gone]

        unique = store_barrier(options, "new_group", departed)
        return world, subset(comms.world, members, str(options.group_id)), unique
    # The default group is another backend's, whose order of ranks may differ from MPI's.
    unique = store_barrier(options, "new_group", lambda _: [])
    world = world or _world_of_size(len(members))
    options.store.set(f"mpi/{options.group_rank}", str(world.rank))
    keys = [f"mpi/{rank}" for rank in range(len(members))]
    members = [int(rank) for rank in options.store.multi_get(keys)]
    return world, subset(world.comm, members, str(options.group_id)), unique


def store_barrier(options: Any, name: str, departed: Departed) -> str:
    """Wait until every rank of a new group has arrived. Collective, by the group's store alone.

    A rank that arrives after the others have given up fails as well.

    Args:
        options: of the process group, from torch.
        name: the function that the ranks call, for error messages.
        departed: says which of the missing ranks have left the job.

    Returns:
        A unique name for the group, the same on every rank.

    Raises:
        CollectiveError: a rank did not arrive in time, or has left the job.
    """
    size = options.group_size
    limit_sec = options.timeout.total_seconds()
    if size == 1:
        return uuid.uuid4().hex
    outcome = _meet(options.store, options.group_rank, size, limit_sec, departed)
    if "missing" in outcome:
        raise CollectiveError(
            f"timed out after {limit_sec:g} s in {name}: waiting for "
            f"{format_ranks(outcome['missing'], size)}"
        )
    if "left" in outcome:
        raise CollectiveError(
            f"{name}: {format_ranks(outcome['left'], size)} left the job without calling it; "
            "every rank must call it"
        )
    return str(outcome["unique"])


def clear_store_barrier(store: dist.Store, rank: int) -> None:
    """Delete the barrier's keys: a script may reuse its store for a group of the same name.

    Every rank must have left the barrier.
    """
    keys = [f"kaitian/{rank}"]
    if rank == 0:
        keys += [_COUNT, _OUTCOME]
    for key in keys:
        store.delete_key(key)


def _meet(
    store: dist.Store, rank: int, size: int, limit_sec: float, departed: Departed
) -> dict[str, Any]:
    """Wait for all ranks, and return the outcome, the same on every rank.

    It has one entry: a name that is `unique`, or the ranks that are `missing` or have `left`.
    """
    store.set(f"kaitian/{rank}", "")
    if store.add(_COUNT, 1) == size:
        _set_outcome(store, unique=uuid.uuid4().hex)
    began = checked = time.monotonic()
    # Polled: `store.wait` would block other threads' use of a TCPStore client, and torch logs its
    # timeouts.
    while not store.check([_OUTCOME]):
        now = time.monotonic()
        if now - began > limit_sec:
            return _set_outcome(store, missing=_missing(store, size))
        if now - checked > _DEPARTED_INTERVAL_SEC:
            checked = now
            left = departed(_missing(store, size))
            if left:
                return _set_outcome(store, left=left)
        nap(now - began, _MAX_NAP_SEC, _MIN_NAP_SEC)
    return dict(json.loads(store.get(_OUTCOME)))


def _set_outcome(store: dist.Store, **outcome: Any) -> dict[str, Any]:
    """Set the outcome unless another rank has; return the one that is set."""
    return dict(json.loads(store.compare_set(_OUTCOME, "", json.dumps(outcome))))


def _missing(store: dist.Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"kaitian/{rank}"])]


def _departed(world: World | None) -> list[int]:
    return [] if world is None else finished_ranks(world)


def _accept_pickled_paths(pythons: Iterable[str]) -> None:
    """Let this process unpickle the paths of ranks with Python 3.13, as in torch's checkpoints.

    3.13 pickles a `Path` as a class of `pathlib._local`, a module that earlier releases do not
    have, and that 3.14 has for such pickles alone (python/cpython#133789).
    """
    if sys.version_info < (3, 13) and any(version.startswith("3.13.") for version in pythons):
        sys.modules.setdefault("pathlib._local", pathlib)


def _check_all_ranks(group_size: int) -> None:
    """Reject a first group over `kaitian` without all ranks, beside another backend's groups."""
    job_size = max(read_launch(os.environ).world_size, dist.get_world_size())
    if group_size < job_size:
        # torch calls only the members, but all ranks must initialize MPI together.
        raise UserError(
            f"the first group over kaitian has {group_size} of {job_size} ranks, but all ranks "
            'initialize MPI together; call new_group(backend="kaitian"), for all ranks, '
            "before it"
        )
