"""Every rank's figures of every step, a step late, so that nobody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.runtime.lifecycle import close_at_exit, closed_early
from kaitian_mpi.runtime.polling import abandon, wait_for
from kaitian_mpi.runtime.ulfm import is_revoked, track

if TYPE_CHECKING:
    from mpi4py import MPI


class StepExchange:
    """Gathers a few numbers from every rank in each step, while the next one is computed."""

    def __init__(self, comm: MPI.Intracomm, count: int) -> None:
        """Prepare for `count` numbers a rank. Collective over `comm`, as every method is."""
        self._comm = track(comm.Dup())
        self._own = np.empty(count)
        self._gathered = np.empty((comm.size, count))
        self._request: MPI.Request | None = None
        close_at_exit(self.close)

    def swap(self, values: Sequence[float]) -> np.ndarray | None:
        """Start sending this step's numbers, and return those of the step before.

        Returns:
            float64 [ranks, count]; None in the first call.
        """
        before = self._receive()
        self._own[:] = values
        self._request = self._comm.Iallgather(self._own, self._gathered)
        return before

    def close(self, together: bool = True) -> None:
        """End the exchange; what is under way is received and dropped.

        Args:
            together: False where a rank may be lost, so that nobody is waited for.
        """
        closed_early(self.close)
        if together and not is_revoked(self._comm):
            self._receive()
            self._comm.Free()
        elif self._request is not None:
            abandon(self._request, self._own, self._gathered)

    def _receive(self) -> np.ndarray | None:
        if self._request is None:
            return None
        wait_for(self._request)
        self._request = None
        return self._gathered.copy()
