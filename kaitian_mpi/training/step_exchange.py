"""Every rank's report of every step, a step late, so that no rank waits for another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_type_hints

import numpy as np

from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import abandon, wait_for
from kaitian_mpi.runtime.ulfm import is_revoked, track_comm

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class StepReport:
    """What a rank reports of a step to all others; a field more is one number more per rank."""

    samples: int
    """This rank's in the step."""
    timed_steps: int
    """How many steps its device has finished since the last report."""
    computed_sec: float
    """Of these steps, without waiting."""
    waited_sec: float
    """Of these steps, for communication."""
    data_sec: float
    """Getting the step's batch."""
    wants_checkpoint: bool = False
    """Whether it asks for a checkpoint."""

    def to_row(self) -> tuple[float, ...]:
        """Return the fields in order, as they are exchanged."""
        return tuple(float(getattr(self, name)) for name in _FIELDS)

    @classmethod
    def from_row(cls, row: Sequence[float]) -> StepReport:
        """Return the report that `to_row` was called on."""
        return cls(*(kind(value) for kind, value in zip(_FIELDS.values(), row, strict=True)))


_FIELDS: dict[str, type] = get_type_hints(StepReport)  # in the order in which they are exchanged


class StepExchange:
    """Gathers every rank's report of a step, while the next one is computed."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Prepare. Collective over `comm`, as every method is."""
        self._comm = track_comm(comm.Dup())
        self._own = np.empty(len(_FIELDS))
        self._gathered = np.empty((comm.size, len(_FIELDS)))
        self._request: MPI.Request | None = None
        register_close(self.close)

    def swap(self, report: StepReport) -> list[StepReport] | None:
        """Start sending this step's report, and return those of the step before, by rank.

        Returns:
            None in the first call.
        """
        before = self._receive()
        self._own[:] = report.to_row()
        self._request = self._comm.Iallgather(self._own, self._gathered)
        return before

    def close(self, together: bool = True) -> None:
        """End the exchange; what is under way is received and dropped.

        Args:
            together: False where a rank may be lost, so that no rank is waited for.
        """
        unregister_close(self.close)
        if together and not is_revoked(self._comm):
            self._receive()
            self._comm.Free()
        elif self._request is not None:
            abandon(self._request, self._own, self._gathered)

    def _receive(self) -> list[StepReport] | None:
        if self._request is None:
            return None
        wait_for(self._request)
        self._request = None
        return [StepReport.from_row(row) for row in self._gathered.tolist()]
