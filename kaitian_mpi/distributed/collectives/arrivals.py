"""Arrival tracking: waits for the other ranks of a group, and names the missing ones.

If a vendor's library waits for them, a thread looks for those that will not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from kaitian_mpi.errors import OPERATION_PLACEHOLDER, CollectiveError, RankLostError, format_ranks
from kaitian_mpi.mpi import pairwise
from kaitian_mpi.observe.timeline.recorder import part
from kaitian_mpi.preflight.verdict import by_value, differ
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import keep_alive, wait_request

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.store import MPIStore

_RECORD_AFTER_SEC = 1.0
_EVENTS_INTERVAL_SEC = 2.0
_WATCH_SEC = 0.02
_ANSWER_SEC = 1.0
_PASSED, _FAILED = b"passed", b"failed"
_ENDED, _FAILURE = "ended/", "failure"


class ArrivalTracker:
    """Tracks which ranks have arrived at a group's collectives.

    A rank that has waited for a second records its arrival in the group's store; at the timeout the
    ranks without a record are missing. Nothing is sent as long as no rank waits that long.
    """

    def __init__(self, comm: MPI.Comm, store: MPIStore, timeout: timedelta) -> None:
        """Track the ranks of `comm`, by the group's own `store`."""
        self._comm = comm
        self._store = store
        self.set_timeout(timeout)
        self._calls = 0
        self._operation = "a collective"
        self._arrived_at = self._met_at = time.monotonic()

    def begins(self, operation: str) -> None:
        """Set the name of the operation that begins, for other ranks' errors."""
        self._operation = operation

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the following collectives; must be the same on every rank."""
        self._timeout_sec, self._record_after_sec = _limits(timeout)
        self._store.set_timeout(timeout)
        # A rank that arrives this long after the last collective may arrive after the others'
        # timeout.
        self._late_sec = self._timeout_sec - self._record_after_sec

    def arrive(self) -> None:
        """Wait, without spinning, until every rank has arrived at its next collective. Collective.

        Raises a `CollectiveError` if a rank did not arrive within the group's timeout, or has left
        the group, or this rank arrives after the others' timeout.
        """
        self.meet(self._comm.Ibarrier())

    def meet(self, request: MPI.Request, *buffers: object) -> None:
        """Wait likewise for a nonblocking collective that ends only when all ranks have arrived."""
        arrived_at = time.monotonic()
        with part("wait for all ranks"):
            # Not since the last collective, which other ranks may have left long before this one
            # arrived, as the root of a broadcast does. A blocking call follows, for which no rank
            # may have given up.
            self._complete(request, buffers, self._met_at)
        self._met_at = arrived_at

    def complete(self, request: MPI.Request, *buffers: object) -> None:
        """Wait likewise until a nonblocking collective on tensors is done. Collective."""
        self._complete(request, buffers, self._arrived_at)

    def _complete(self, request: MPI.Request, buffers: tuple[object, ...], since: float) -> None:
        """Wait for a request; no other rank has waited for this one since before `since`."""
        self._arrived_at = now = time.monotonic()
        self._calls += 1
        try:
            if not wait_request(request, self._record_after_sec):
                self._wait_recorded(request)
                now = time.monotonic()
        except Exception as error:
            keep_alive(request, buffers)
            if (unlike := pairwise.different_sizes_error(error)) is None:
                raise
            raise unlike from error
        # No rank has given up on one that arrived before that and has waited no longer.
        if now - since > self._late_sec and self._settle(_PASSED) == _FAILED:
            raise CollectiveError(
                f"rank {self._comm.rank} of {self._comm.size} arrived too late in "
                f"{OPERATION_PLACEHOLDER} #{self._calls}: the others {self._failure()}"
            )

    def close(self) -> None:
        """Record that this rank has ended the group, for ranks that wait for it. Not collective."""
        # The rank that served the store may have died; ranks that wait learn that from MPI.
        with ulfm.tolerating_loss():
            self._store.set(f"{_ENDED}{self._comm.rank}", str(self._calls))

    def ranks_left(self, until: Callable[[], bool]) -> list[int]:
        """Return the ranks that have ended the group; none if `until` comes before the answer."""
        ended = self._store.items(_ENDED, until)
        return [rank for rank in range(self._comm.size) if str(rank) in ended]

    def _wait_recorded(self, request: MPI.Request) -> None:
        self._store.set(f"arrived/{self._comm.rank}", f"{self._calls} {self._operation}")
        deadline = time.monotonic() + self._timeout_sec - self._record_after_sec

        def is_over() -> bool:
            return bool(request.Test()) or time.monotonic() > deadline

        while (remaining := deadline - time.monotonic()) > 0:
            if wait_request(request, min(_EVENTS_INTERVAL_SEC, remaining)):
                return
            self._check_ended(is_over)
        # A rank that arrived a moment ago will have recorded it after this wait.
        if wait_request(request, 1.5 * self._record_after_sec):
            return
        # A late rank may have arrived at this moment: either all continue, or all fail.
        if self._settle(_FAILED) == _PASSED and wait_request(request, self._timeout_sec):
            return
        arrived = self._store.items("arrived/")
        text = describe_timeout(self._timeout_sec, self._calls, arrived, self._comm.size)
        self._store.set(f"{_ENDED}{_FAILURE}", text)
        raise CollectiveError(text)

    def _check_ended(self, until: Callable[[], bool]) -> None:
        """Raise an error if a rank will never arrive, or if the group has failed."""
        ended = self._store.items(_ENDED, until)
        size = self._comm.size
        if _FAILURE in ended:
            raise CollectiveError(f"the group failed before: {self._failure()}")
        missing = [r for r in range(size) if int(ended.get(str(r), self._calls)) < self._calls]
        if missing:
            raise CollectiveError(
                f"{format_ranks(missing, size)} ended the group before {OPERATION_PLACEHOLDER} "
                f"#{self._calls}, by destroy_process_group or the end of its script"
            )

    def _settle(self, outcome: bytes) -> bytes:
        """Return the outcome of this collective: that of the first rank to set it."""
        try:
            return self._store.compare_set(f"outcome/{self._calls}", b"", outcome)
        except dist.DistStoreError as error:
            raise CollectiveError(f"{OPERATION_PLACEHOLDER} #{self._calls}: {error}") from None

    def _failure(self) -> str:
        text = self._store.get(f"{_ENDED}{_FAILURE}").decode()
        return text.replace(f"{OPERATION_PLACEHOLDER} ", "collective ")


class LibraryWatch:
    """Watches, in a thread, for ranks for which a vendor's library waits in vain.

    A library's kernel waits for a lost rank forever, and so does a caller that waits for the
    device; MPI reports the loss to neither.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        store: MPIStore,
        timeout: timedelta,
        on_failure: Callable[[CollectiveError], None],
    ) -> None:
        """Start the thread. Not collective.

        `on_failure` is called once, in the thread, if one of `ranks` (the library's, among those of
        `comm`) is lost or does not arrive. `store` is only for these ranks' calls of the library.
        """
        self._comm = comm
        self._ranks = ranks
        self._store = store
        self._on_failure = on_failure
        self.set_timeout(timeout)
        self._calls = 0
        self._name = ""
        self._called_at = time.monotonic()
        self._recorded = self._compared = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="kaitian-library", daemon=True)
        self._thread.start()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_sec, self._record_after_sec = _limits(timeout)

    def called(self, name: str) -> None:
        self._name = name
        self._called_at = time.monotonic()
        self._calls += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        try:
            while not self._stop.wait(_WATCH_SEC):
                failure = self._failure()
                if failure is not None:
                    self._on_failure(failure)
                    return
        except BaseException:  # without this thread, a lost rank would be waited for forever
            abort_with_traceback("looking for lost ranks failed:\n")

    def _failure(self) -> CollectiveError | None:
        with ulfm.tolerating_loss():
            if not (ulfm.is_enabled() and ulfm.is_loss_detected(self._comm)):
                return self._timeout_error()
        ulfm.revoke_all()
        lost = ulfm.lost_ranks(self._comm)
        named = f": {format_ranks(lost, self._comm.size)}" if lost else ""
        return RankLostError(f"a rank is lost{named}")

    def _timeout_error(self) -> CollectiveError | None:
        """Return an error if a rank has not made this rank's last call within the timeout."""
        calls = self._calls
        name = self._name
        waited = time.monotonic() - self._called_at
        if self._recorded < calls and waited > self._record_after_sec:
            self._store.set(str(self._comm.rank), str(calls))
            self._recorded = calls
        # A rank that arrived a moment ago will have recorded it by then.
        if self._compared == calls or waited < self._timeout_sec + 1.5 * self._record_after_sec:
            return None
        give_up = time.monotonic() + _ANSWER_SEC
        recorded = self._store.items("", until=lambda: time.monotonic() > give_up)
        if calls != self._calls or str(self._comm.rank) not in recorded:  # it may answer later
            return None
        self._compared = calls
        missing = [rank for rank in self._ranks if int(recorded.get(str(rank), 0)) < calls]
        if not missing:
            return None
        return CollectiveError(_timed_out(self._timeout_sec, name, calls, missing, self._comm.size))


def describe_timeout(sec: float, calls: int, arrived: Mapping[str, bytes], size: int) -> str:
    """Return why a group's collective number `calls` timed out, by the ranks' records."""
    records = {int(rank): record.decode().partition(" ") for rank, record in arrived.items()}
    missing = [rank for rank in range(size) if rank not in records or int(records[rank][0]) < calls]
    names = {rank: name for rank, (_, _, name) in sorted(records.items())}
    if not missing and differ(names):
        return (
            f"timed out after {sec:g} s: the ranks called different collectives "
            f"({by_value(names)}); call the same ones in the same order on every rank"
        )
    return _timed_out(sec, OPERATION_PLACEHOLDER, calls, missing, size)


def _limits(timeout: timedelta) -> tuple[float, float]:
    """Return the seconds after which a rank gives up, and after which it records its arrival."""
    sec = timeout.total_seconds()
    return sec, min(_RECORD_AFTER_SEC, sec / 4)


def _timed_out(sec: float, name: str, calls: int, missing: Sequence[int], size: int) -> str:
    return (
        f"timed out after {sec:g} s in {name} #{calls}: waiting for "
        f"{format_ranks(missing, size)}; set a longer timeout for the group if they are only slow"
    )
