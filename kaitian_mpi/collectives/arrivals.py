"""Arrival tracking: waits for the other ranks of a group, and names the missing ones."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.errors import (
    OPERATION_PLACEHOLDER,
    CollectiveError,
    RankLostError,
    format_ranks,
)
from kaitian_mpi.runtime.polling import keep_alive, wait_request
from kaitian_mpi.runtime.ulfm import may_be_loss
from kaitian_mpi.tracing.collectives import part

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from kaitian_mpi.mpi.store import MPIStore

_RECORD_AFTER_SEC = 1.0
_EVENTS_INTERVAL_SEC = 2.0
_PASSED, _FAILED = b"passed", b"failed"


class ArrivalTracker:
    """Tracks which ranks have arrived at a group's collectives.

    A rank that has waited for a second records its arrival in the group's store; at the timeout the
    ranks without a record are missing. Nothing is sent as long as no rank waits that long.
    """

    def __init__(self, comm: MPI.Comm, store: MPIStore, timeout: timedelta) -> None:
        """Track the ranks of `comm`, by the group's own `store`, whose client never blocks."""
        self._comm = comm
        self._store = store
        self.set_timeout(timeout)
        self._calls = 0
        self._arrived_at = self._done_at = time.monotonic()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the following collectives; must be the same on every rank."""
        self._timeout_sec = timeout.total_seconds()
        self._record_after_sec = min(_RECORD_AFTER_SEC, self._timeout_sec / 4)
        # A rank that arrives this long after the last collective may be later than the others'
        # timeout.
        self._late_sec = self._timeout_sec - self._record_after_sec

    def arrive(self) -> None:
        """Wait, without spinning, until every rank has arrived at its next collective. Collective.

        Raises:
            CollectiveError: a rank did not arrive within the group's timeout, or has left the
                group, or this rank arrives after the others' timeout.
        """
        arrived_at = time.monotonic()
        self._calls += 1
        request = self._comm.Ibarrier()
        with part("wait for all ranks"):
            if not wait_request(request, self._record_after_sec):
                self._wait_long(request, ())
        # Other ranks cannot have waited for this one since before its previous arrival. A blocking
        # call follows, for which no rank may have given up.
        self._done_at = time.monotonic()
        if self._done_at - self._arrived_at > self._late_sec:
            self._confirm()
        self._arrived_at = arrived_at

    def complete(self, request: MPI.Request, *tensors: torch.Tensor) -> None:
        """Wait, without spinning, until a nonblocking collective is done. Collective.

        Args:
            request: the collective's MPI request.
            tensors: the tensors it reads and writes.

        Raises:
            CollectiveError: as for `arrive`.
        """
        self._calls += 1
        if not wait_request(request, self._record_after_sec):
            self._wait_long(request, tensors)
        now = time.monotonic()
        if now - self._done_at > self._late_sec:
            self._confirm()
        self._done_at = now

    def leave(self) -> None:
        """Record that this rank has ended the group, for ranks that wait for it. Not collective."""
        try:
            self._store.set(f"left/{self._comm.rank}", str(self._calls))
            self._store.append("events", "left ")
        except Exception as error:
            # The rank that served the store may have died; ranks that wait learn that from MPI.
            if not (isinstance(error, RankLostError) or may_be_loss(error)):
                raise

    def ranks_left(self) -> list[int]:
        """Return the ranks that have ended the group. Not collective."""
        if not self._store.check(["events"]):
            return []
        return [rank for rank in range(self._comm.size) if self._store.check([f"left/{rank}"])]

    def _wait_long(self, request: MPI.Request, tensors: tuple[torch.Tensor, ...]) -> None:
        try:
            self._wait_recorded(request)
        except CollectiveError:
            keep_alive(request, tensors)
            raise

    def _wait_recorded(self, request: MPI.Request) -> None:
        self._store.set(f"arrived/{self._comm.rank}", str(self._calls))
        deadline = time.monotonic() + self._timeout_sec - self._record_after_sec
        while (remaining := deadline - time.monotonic()) > 0:
            if wait_request(request, min(_EVENTS_INTERVAL_SEC, remaining)):
                return
            self._check_events()
        # A rank that arrived a moment ago will have recorded it after this wait.
        if wait_request(request, 1.5 * self._record_after_sec):
            return
        # A late rank may have arrived at this moment: either all continue, or all fail.
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
        """Raise an error if a rank will never arrive, or if the group has failed."""
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
            CollectiveError: a rank has given up.
        """
        if self._settle(_PASSED) == _FAILED:
            raise CollectiveError(
                f"rank {self._comm.rank} of {self._comm.size} arrived too late in "
                f"{OPERATION_PLACEHOLDER} #{self._calls}: the others {self._failure()}"
            )

    def _settle(self, outcome: bytes) -> bytes:
        """Return the outcome of this collective: that of the first rank to set it."""
        return self._store.compare_set(f"outcome/{self._calls}", b"", outcome)

    def _failure(self) -> str:
        text = self._store.get("failure").decode()
        return text.replace(f"{OPERATION_PLACEHOLDER} ", "collective ")

    def _reached(self, event: str, rank: int) -> bool:
        key = f"{event}/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._calls
