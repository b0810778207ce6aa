"""`monitored_barrier`: a barrier after which rank 0 knows which ranks are missing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.errors import MissingRanksError
from kaitian_mpi.runtime.polling import keep_alive, wait_request
from kaitian_mpi.runtime.tags import MONITORED_BARRIERS

if TYPE_CHECKING:
    from mpi4py import MPI

_MARGIN_SEC = 2.0  # for rank 0's answer after its own timeout


class MonitoredBarrier:
    """Every rank reports to rank 0 and waits for its answer. Can be repeated after a failure.

    The messages have their own tags, so that it can run beside collectives over the same ranks.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._calls = 0
        # Pending until the other rank arrives, perhaps forever; they keep their buffers alive.
        self._sent: list[MPI.Request] = []

    def run(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Wait for every rank; name the first missing one or, if asked to, all. Collective.

        Raises:
            MissingRanksError: a rank did not arrive; raised on every rank that did.
        """
        self._calls += 1
        tag = MONITORED_BARRIERS[self._calls % len(MONITORED_BARRIERS)]
        limit_sec = timeout.total_seconds()
        if self._comm.rank == 0:
            self._collect_reports(tag, limit_sec, wait_all_ranks)
        else:
            self._report(tag, limit_sec)

    def _collect_reports(self, tag: int, limit_sec: float, wait_all_ranks: bool) -> None:
        reports = {
            rank: self._comm.Irecv(np.empty(1, dtype=np.int8), rank, tag)
            for rank in range(1, self._comm.size)
        }
        deadline = time.perf_counter() + limit_sec
        missing: list[int] = []
        for rank, report in reports.items():
            if not wait_request(report, deadline - time.perf_counter()):
                missing.append(rank)
                report.Cancel()
                keep_alive(report)
        verdict = np.array([len(missing)], dtype=np.int32)
        self._sent = [self._comm.Isend(verdict, rank, tag) for rank in reports]
        # Worded as gloo does, which scripts look for.
        if missing and limit_sec <= 0:  # no rank had a chance
            raise MissingRanksError("Rank 0 timed out in monitoredBarrier after 0 ms")
        if missing:
            listed = ", ".join(map(str, missing))
            named = f"Ranks {listed}" if wait_all_ranks else f"Rank {missing[0]}"
            raise MissingRanksError(
                f"{named} failed to pass monitoredBarrier in {limit_sec * 1000:.0f} ms"
            )

    def _report(self, tag: int, limit_sec: float) -> None:
        answer = np.empty(1, dtype=np.int32)
        self._sent = [self._comm.Isend(np.zeros(1, dtype=np.int8), 0, tag)]
        request = self._comm.Irecv(answer, 0, tag)
        answered = wait_request(request, limit_sec + _MARGIN_SEC)
        if not answered:
            keep_alive(request)
        if not answered or answer[0]:
            raise MissingRanksError(
                f"Rank {self._comm.rank} successfully reached monitoredBarrier, but received "
                "errors while waiting for send/recv from rank 0. Please check rank 0 logs for "
                "faulty rank."
            )
