"""Tracking of arrivals: waiting for the other ranks of a group, and naming who has not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.errors import OPERATION_PLACEHOLDER, CollectiveError, format_ranks
from kaitian_mpi.runtime.polling import keep_alive, wait_request

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from kaitian_mpi.mpi.store import MPIStore

_SIGNING_SEC = 1.0
_LOOKING_SEC = 2.0
_PASSED, _FAILED = b"passed", b"failed"


class ArrivalTracker:
    """Knows which ranks have arrived at a group's collectives.

    A rank that has waited for a second signs in the group's store; at the time-out those who have
    not signed are the ones that are missing. While all is well nothing is sent.
    """

    def __init__(self, comm: MPI.Comm, store: MPIStore, timeout: timedelta) -> None:
        """Prepare for the ranks of `comm`; `store` is the group's own, and never busy."""
        self._comm = comm
        self._store = store
        self.set_timeout(timeout)
        self._calls = 0
        self._arrived_at = self._done_at = time.monotonic()

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the collectives that follow another time-out, the same on every rank."""
        self._timeout_sec = timeout.total_seconds()
        self._signing_sec = min(_SIGNING_SEC, self._timeout_sec / 4)
        # A rank that comes so long after the last collective may come after the others' time-out.
        self._late_sec = self._timeout_sec - self._signing_sec

    def arrive(self) -> None:
        """Wait, without spinning, until every rank has come to its next collective. Collective.

        Raises:
            CollectiveError: some rank did not come within the group's time-out, or has left the
                group, or this rank comes after the others' time-out.
        """
        arrived_at = time.monotonic()
        self._calls += 1
        request = self._comm.Ibarrier()
        if not wait_request(request, self._signing_sec):
            self._wait_long(request, ())
        # No other rank has begun to wait for this one before it arrived the last time. What
        # follows is a blocking call, for which all must have stayed.
        self._done_at = time.monotonic()
        if self._done_at - self._arrived_at > self._late_sec:
            self._confirm()
        self._arrived_at = arrived_at

    def complete(self, request: MPI.Request, *tensors: torch.Tensor) -> None:
        """Wait, without spinning, until a collective that has been started is done. Collective.

        Args:
            request: the collective.
            tensors: what it reads and writes.

        Raises:
            CollectiveError: as `arrive`.
        """
        self._calls += 1
        if not wait_request(request, self._signing_sec):
            self._wait_long(request, tensors)
        now = time.monotonic()
        if now - self._done_at > self._late_sec:
            self._confirm()
        self._done_at = now

    def leave(self) -> None:
        """Let the ranks that wait for this one know that it has ended the group. Not collective."""
        self._store.set(f"left/{self._comm.rank}", str(self._calls))
        self._store.append("events", "left ")

    def ranks_left(self) -> list[int]:
        """Return the ranks that have ended the group. Not collective."""
        if not self._store.check(["events"]):
            return []
        return [rank for rank in range(self._comm.size) if self._store.check([f"left/{rank}"])]

    def _wait_long(self, request: MPI.Request, tensors: tuple[torch.Tensor, ...]) -> None:
        try:
            self._wait_signed(request)
        except CollectiveError:
            keep_alive(request, tensors)
            raise

    def _wait_signed(self, request: MPI.Request) -> None:
        self._store.set(f"arrived/{self._comm.rank}", str(self._calls))
        deadline = time.monotonic() + self._timeout_sec - self._signing_sec
        while (remaining := deadline - time.monotonic()) > 0:
            if wait_request(request, min(_LOOKING_SEC, remaining)):
                return
            self._check_events()
        # Who came a moment ago has signed when this is over.
        if wait_request(request, 1.5 * self._signing_sec):
            return
        # A late rank may have come at this moment: either all go on, or all fail.
        if self._settle(_FAILED) == _PASSED and wait_request(request, self._timeout_sec):
            return
        missing = [rank for rank in range(self._comm.size) if not self._reached("arrived", rank)]
        text = (
            f"timed out after {self._timeout_sec:g} s in {OPERATION_PLACEHOLDER} #{self._calls}: "
            f"waiting for {format_ranks(missing, self._comm.size)}; "
            "give the group a longer timeout if it is only slow"
        )
        self._store.set("failure", text)
        self._store.append("events", "failed ")
        raise CollectiveError(text)

    def _check_events(self) -> None:
        """Raise an error if some rank will not come, or no collective of the group can follow."""
        if not self._store.check(["events"]):
            return
        size = self._comm.size
        if self._store.check(["failure"]):
            raise CollectiveError(f"the group failed before: {self._failure()}")
        left = [r for r in range(size) if self._store.check([f"left/{r}"])]
        missing = [rank for rank in left if not self._reached("left", rank)]
        if missing:
            raise CollectiveError(
                f"{format_ranks(missing, size)} ended the group before {OPERATION_PLACEHOLDER} "
                f"#{self._calls}, by destroy_process_group or the end of its script"
            )

    def _confirm(self) -> None:
        """Check that no rank has given up waiting for this one.

        Raises:
            CollectiveError: one has.
        """
        if self._settle(_PASSED) == _FAILED:
            raise CollectiveError(
                f"rank {self._comm.rank} of {self._comm.size} arrived too late in "
                f"{OPERATION_PLACEHOLDER} #{self._calls}: the others {self._failure()}"
            )

    def _settle(self, outcome: bytes) -> bytes:
        """Return the outcome of this collective: what the first rank that asks says."""
        return self._store.compare_set(f"outcome/{self._calls}", b"", outcome)

    def _failure(self) -> str:
        text = self._store.get("failure").decode()
        return text.replace(f"{OPERATION_PLACEHOLDER} ", "collective ")

    def _reached(self, event: str, rank: int) -> bool:
        key = f"{event}/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._calls
