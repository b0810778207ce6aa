"""What the ranks tell each other at each step: how long it took them, and what they do next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.preflight.verdict import by_value, differ
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import keep_alive, wait_request
from kaitian_mpi.runtime.ulfm import is_revoked, track_comm
from kaitian_mpi.runtime.watchdog import enter_phase

if TYPE_CHECKING:
    from mpi4py import MPI

_SPEAKER_SEC = 5.0


class StepReports(NamedTuple):
    """All ranks' reports about a step, as arrays with one entry per rank."""

    times: RankSteps
    """Getting the batch counts as the rank's own work, like computing."""
    data_sec: np.ndarray
    wants_checkpoint: np.ndarray


class ReportExchange:
    """Gathers some numbers of every rank, while the ranks go on. Every method is collective."""

    def __init__(self, comm: MPI.Intracomm, fields: int) -> None:
        """Exchange so many numbers of each rank over `comm`, which nothing else may use."""
        self._comm = comm
        self._report = np.empty(fields)
        self._gathered = np.empty((comm.size, fields))
        self._request: MPI.Request | None = None

    def start(self, report: Sequence[float]) -> None:
        """Start to gather the ranks' reports; those before must have been received."""
        assert self._request is None
        self._report[:] = report
        self._request = self._comm.Iallgather(self._report, self._gathered)

    def receive(self) -> np.ndarray | None:
        """Return what was gathered since the last call, a row for each rank; None if nothing was.

        It holds until the next `start`.
        """
        if self._request is None:
            return None
        wait_request(self._request)
        self._request = None
        return self._gathered

    def abandon(self) -> None:
        """Wait for no rank, as one may be lost; MPI keeps its buffers. Not collective."""
        if self._request is not None:
            keep_alive(self._request, self._report, self._gathered)


class Call(IntEnum):
    """What a rank does next in its script, as all have to."""

    TRAIN = 0
    SUM = 1
    FINISH = 2
    BEGIN_EPOCH = 3
    EVALUATE = 4
    STOP = 5

    @property
    def waits(self) -> bool:
        """Whether it begins only once all ranks are known to do the same."""
        return self > Call.FINISH

    def __str__(self) -> str:
        steps = "the next step", "backward()", "the end of the run"
        return (*steps, "the next epoch", "evaluate()", "the end of the training")[self]


class StepExchange:
    """Gathers every rank's report of a step while the next step is computed.

    And what each rank does next, so that ranks that part are told so, and none waits for them.
    """

    _FIELDS = 6

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator. Collective over `comm`, as is every method."""
        self._comm = track_comm(comm.Dup())
        self._reports = ReportExchange(self._comm, self._FIELDS)
        self._calls: list[tuple[MPI.Request, np.ndarray, np.ndarray]] = []  # not checked yet
        self._is_closed = False
        register_close(self.close)

    def announce(self, call: Call, step: int) -> None:
        """Tell the other ranks what this one does after a step, and check that they do the same.

        A rank that trains learns it only at its next call; in between it may wait for the others.

        Raises:
            UserError: the ranks do different things.
        """
        if self._is_closed:  # a rank was lost: the step is repeated by another loop
            return
        if call is not Call.SUM:  # amid a step nobody waits: the time would count as computing
            self._check_calls(step)
        own, calls = np.array([call], np.int64), np.empty(self._comm.size, np.int64)
        self._calls.append((self._comm.Iallgather(own, calls), own, calls))
        if call.waits:
            enter_phase("what the other ranks do next", waits=True, limited=False)
            self._check_calls(step)

    def _check_calls(self, step: int) -> None:
        while self._calls:
            wait_request(self._calls[0][0])
            self._compare(self._calls.pop(0)[-1].tolist(), step)

    def _compare(self, by_rank: Sequence[int], step: int) -> None:
        """Raise an error if the ranks do different things."""
        calls = {rank: Call(call) for rank, call in enumerate(by_rank)}
        names = {rank: str(call) for rank, call in calls.items()}
        if not differ(names):
            return
        text = (
            f"the ranks do different things after step {step}: {by_value(names)}; make the same "
            "calls on every rank, and leave loops on all of them or on none"
        )
        waiting = [rank for rank, call in calls.items() if call.waits] or [0]
        if len(waiting) == len(calls):
            raise AgreedError(text)
        if self._comm.rank != waiting[0]:
            time.sleep(_SPEAKER_SEC)  # the first of those that know it says so, and ends the job
        raise UserError(text)

    def swap(self, report: Sequence[float]) -> StepReports | None:
        """Start sending this step's report; return all of the step before, or None in the first."""
        previous = self._receive()
        self._reports.start(report)
        return previous

    def close(self, together: bool = True) -> None:
        """End the exchange; without waiting, if not `together`: a rank may be lost."""
        unregister_close(self.close)
        self._is_closed = True
        if together and not is_revoked(self._comm):
            self._reports.receive()
            for request, *_ in self._calls:
                wait_request(request)
            self._comm.Free()
            return
        self._reports.abandon()
        for request, own, calls in self._calls:
            keep_alive(request, own, calls)

    def _receive(self) -> StepReports | None:
        gathered = self._reports.receive()
        if gathered is None:
            return None
        steps, samples, work_sec, wait_sec, data_sec, wants = gathered.T.copy()
        times = RankSteps(steps.astype(int), samples.astype(int), work_sec, wait_sec)
        return StepReports(times, data_sec, wants.astype(bool))
