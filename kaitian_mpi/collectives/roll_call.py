"""Waiting for the other ranks of a group, and telling who has not come."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.waiting import abandon, wait_for

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

_SIGNING_SEC = 1.0
_FAILED = "failed"


class RollCall:
    """The arrivals at a group's collectives.

    A rank that has waited for a second signs in the group's store; at the time-out those who have
    not signed are the ones that are missing.
    """

    def __init__(self, comm: MPI.Comm, store: dist.Store, timeout: timedelta) -> None:
        """Prepare for the ranks of `comm`; `store` is the group's own."""
        self._comm = comm
        self._store = store
        self._timeout_sec = timeout.total_seconds()
        self._signing_sec = min(_SIGNING_SEC, self._timeout_sec / 2)
        self._calls = 0

    def arrive(self) -> None:
        """Wait, without spinning, until every rank has come to its next collective. Collective.

        Raises:
            CollectiveError: some rank did not come within the group's time-out.
        """
        self.complete(self._comm.Ibarrier())

    def complete(self, request: MPI.Request, *tensors: torch.Tensor) -> None:
        """Wait, without spinning, until a collective that has been started is done. Collective.

        Args:
            request: the collective.
            tensors: what it reads and writes.

        Raises:
            CollectiveError: as `arrive`.
        """
        self._calls += 1
        if not wait_for(request, self._signing_sec):
            self._wait_long(request, tensors)

    def leave(self, comm: MPI.Comm) -> bool:
        """Wait until every rank has come to close the group; False if some rank has failed.

        Collective over `comm`, the same ranks: on the group's own, a rank that has failed left a
        collective unfinished.
        """
        request = comm.Ibarrier()
        while not wait_for(request, _SIGNING_SEC):
            if self._store.check([_FAILED]):
                abandon(request)
                return False
        return True

    def _wait_long(self, request: MPI.Request, tensors: tuple[torch.Tensor, ...]) -> None:
        self._store.set(self._key(self._comm.rank), str(self._calls))
        if wait_for(request, self._timeout_sec - self._signing_sec):
            return
        # Who came a moment ago has signed when this is over.
        if wait_for(request, 2 * self._signing_sec):
            return
        abandon(request, tensors)
        missing = [rank for rank in range(self._comm.size) if not self._has_signed(rank)]
        self._store.set(_FAILED, "")
        named = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        raise CollectiveError(
            f"Timed out after {self._timeout_sec:g} s: {named} of the group's {self._comm.size} "
            f"has not come to the group's collective number {self._calls}"
        )

    def _has_signed(self, rank: int) -> bool:
        key = self._key(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._calls

    def _key(self, rank: int) -> str:
        return f"arrived/{rank}"
