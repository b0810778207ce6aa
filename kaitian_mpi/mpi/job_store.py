"""The job's store, from when the ranks have joined until the last one has departed."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.runtime import ulfm

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.store import MPIStore

_PATIENCE_SEC = 0.5

_store: MPIStore | None = None
_rendezvous_store: MPIStore | None = None  # torch keeps no Python reference, and needs one
_rendezvous_count = 0


def open_job_store(comm: MPI.Intracomm) -> None:
    """Start the store for the ranks of `comm`, replacing the previous one. Collective."""
    global _store, _rendezvous_count
    from kaitian_mpi.mpi.store import MPIStore  # MPI starts with the import

    if _store is not None:
        _store.close()
    _store, _rendezvous_count = MPIStore(comm), 0


def reopen_job_store(comm: MPI.Intracomm) -> None:
    """Start the store again if it was closed by the loss of a rank. Collective."""
    if _store is None or _store.link.is_closed:
        open_job_store(comm)


def job_store() -> MPIStore:
    """Return the store. The ranks must have joined."""
    assert _store is not None
    return _store


def open_rendezvous_store(timeout: timedelta) -> MPIStore:
    """Return an empty store for one rendezvous. Not collective; all ranks call it equally often."""
    global _rendezvous_store, _rendezvous_count
    _rendezvous_count += 1
    _rendezvous_store = job_store().view(f"session {_rendezvous_count}", timeout)
    return _rendezvous_store


def close_job_store_after_loss() -> None:
    """Close the store if a rank is lost: the server may have run on that rank."""
    if _store is not None and not _store.link.is_closed and _store.link.is_lost:
        _store.close()


def finished_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of `comm` whose script has ended; none while the store does not answer."""
    if ulfm.is_enabled() and ulfm.loss_detected_within(comm, 0):
        from kaitian_mpi.errors import RankLostError

        raise RankLostError("a rank is lost")
    give_up = time.monotonic() + _PATIENCE_SEC
    departed = job_store().departed(until=lambda: time.monotonic() > give_up)
    if not departed:
        return []
    from kaitian_mpi.mpi.topology import translate_ranks

    store_ranks = translate_ranks(comm, job_store().link.comm)
    return [rank for rank, store_rank in enumerate(store_ranks) if store_rank in departed]
