"""The job's own store: there from the moment the ranks have joined until the last has departed.

The backend keeps in it who has come where and who has left, whatever store a script gives torch: a
script's own may be busy (a TCPStore's client answers one thread at a time), and a rank that cannot
write down that it waits could not go on waiting either. The rendezvous `mpi://` is a part of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.runtime import ulfm

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.store import MPIStore

_store: MPIStore | None = None
_session: MPIStore | None = None  # torch keeps no Python reference, and needs one
_sessions = 0


def open_job_store(comm: MPI.Intracomm) -> None:
    """Start the store of the ranks of `comm`, in the place of the last. Collective."""
    global _store, _sessions
    from kaitian_mpi.mpi.store import MPIStore  # MPI starts with the import

    if _store is not None:
        _store.close()
    _store, _sessions = MPIStore(comm), 0


def reopen_job_store(comm: MPI.Intracomm) -> None:
    """Start the store again where it ended with the loss of a rank. Collective."""
    if _store is None or _store.link.is_closed:
        open_job_store(comm)


def job_store() -> MPIStore:
    """Return the store; the ranks have joined, so there is one."""
    assert _store is not None
    return _store


def open_session(timeout: timedelta) -> MPIStore:
    """Return an empty store for one rendezvous. Every rank has been to as many; not collective."""
    global _session, _sessions
    _sessions += 1
    _session = job_store().view(f"session {_sessions}", timeout)
    return _session


def close_lost_job_store() -> None:
    """End the store if a rank is lost; its server may have been that rank's."""
    if _store is not None and not _store.link.is_closed and _store.link.is_lost:
        _store.close()


def departed_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of `comm` whose script has ended.

    Raises:
        RankLostError: a rank has died, so that the others may be waited for in vain.
    """
    if ulfm.is_on() and ulfm.may_have_lost_ranks(comm, 0):
        from kaitian_mpi.errors import RankLostError

        raise RankLostError("a rank is lost")
    departed = job_store().departed()
    if not departed:
        return []
    from kaitian_mpi.mpi.topology import positions

    places = positions(comm, job_store().link.comm)
    return [rank for rank, place in enumerate(places) if place in departed]
