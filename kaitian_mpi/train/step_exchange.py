"""Gathers every rank's report of each step one step later, so that no rank waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_type_hints

import numpy as np

from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import keep_alive, wait_request
from kaitian_mpi.runtime.ulfm import is_revoked, track_comm

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class StepReport:
    """What a rank reports to all others about a step. Each field is sent as one float64."""

    samples: int
    """The rank's samples in the step."""
    timed_steps: int
    """The number of steps that its device has finished since the last report."""
    computed_sec: float
    """Compute time of these steps, without waiting."""
    waited_sec: float
    """Time these steps spent waiting for communication."""
    data_sec: float
    """Time spent getting the step's batch."""
    wants_checkpoint: bool = False
    """Whether the rank requests a checkpoint."""

    def to_row(self) -> tuple[float, ...]:
        """Return the fields as numbers, in order."""
        return tuple(float(getattr(self, name)) for name in _FIELDS)


_FIELDS = tuple(get_type_hints(StepReport))  # in the order of `to_row`


class StepReports:
    """All ranks' reports about a step, as arrays with one entry per rank."""

    def __init__(self, rows: np.ndarray) -> None:
        """Take what the ranks' reports return as `to_row`, [ranks, fields]."""
        columns = dict(zip(_FIELDS, rows.T, strict=True))
        self.samples = columns["samples"].astype(int)
        self.timed_steps = columns["timed_steps"].astype(int)
        self.computed_sec = columns["computed_sec"]
        self.waited_sec = columns["waited_sec"]
        self.data_sec = columns["data_sec"]
        self.wants_checkpoint = columns["wants_checkpoint"].astype(bool)

    @classmethod
    def of(cls, reports: Sequence[StepReport]) -> StepReports:
        """Return the reports of ranks 0, 1, … as arrays."""
        return cls(np.array([report.to_row() for report in reports]))


class StepExchange:
    """Gathers every rank's report of a step while the next step is computed."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator. Collective over `comm`, as is every method."""
        self._comm = track_comm(comm.Dup())
        self._own = np.empty(len(_FIELDS))
        self._gathered = np.empty((comm.size, len(_FIELDS)))
        self._request: MPI.Request | None = None
        register_close(self.close)

    def swap(self, report: StepReport) -> StepReports | None:
        """Start sending this step's report; return all reports of the previous step.

        Returns:
            None in the first call.
        """
        previous = self._receive()
        self._own[:] = report.to_row()
        self._request = self._comm.Iallgather(self._own, self._gathered)
        return previous

    def close(self, together: bool = True) -> None:
        """End the exchange; reports in flight are received and dropped.

        Args:
            together: False if a rank may be lost, so that no rank is waited for.
        """
        unregister_close(self.close)
        if together and not is_revoked(self._comm):
            self._receive()
            self._comm.Free()
        elif self._request is not None:
            keep_alive(self._request, self._own, self._gathered)

    def _receive(self) -> StepReports | None:
        if self._request is None:
            return None
        wait_request(self._request)
        self._request = None
        return StepReports(self._gathered.copy())
