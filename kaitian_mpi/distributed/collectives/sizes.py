"""The sizes of the ranks' tensors, which are compared as the ranks arrive at a collective.

MPI does not report a message that is shorter than the memory for it, so that a rank would keep some
of its old numbers; and Open MPI (5.0.11) writes one that is longer beyond the memory's end before
it reports that. In rounds, a rank with other sizes would do another number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi import pairwise

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker

Tensors = Sequence["torch.Tensor | None"]


class Sizes:
    """Compares the ranks' sizes; this also serves as the barrier, and takes no longer than one.

    Every method is collective, and raises on every rank.
    """

    def __init__(self, comm: MPI.Intracomm, arrivals: ArrivalTracker) -> None:
        self._comm = comm
        self._arrivals = arrivals

    def check_equal(self, sizes: Sequence[int]) -> None:
        """Raise a `CollectiveError` if the ranks have different sizes."""
        rows = self._gathered([*sizes])
        _refuse_if((rows != rows[0]).any())

    def check_gather(self, pieces: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Raise a `CollectiveError` if some rank's list is not of the ranks' sizes."""
        rows = self._gathered([*(piece.nbytes for piece in pieces), tensor.nbytes])
        _refuse_if((rows[:, :-1] != rows[:, -1]).any())

    def check_exchange(self, sent: Tensors, received: Tensors) -> int:
        """Return the most bytes that any rank sends, or receives.

        Raises:
            CollectiveError: a rank sends another what that does not receive.
        """
        return self.check_exchanges([(sent, received)])

    def check_exchanges(self, transfers: Sequence[tuple[Tensors, Tensors]]) -> int:
        """Return the same of several exchanges at the same time.

        Raises:
            CollectiveError: a rank sends another what that does not receive.
        """
        size = self._comm.size
        sizes = [
            0 if piece is None else piece.nbytes
            for transfer in transfers
            for pieces in transfer
            for piece in pieces or [None] * size
        ]
        rows = self._gathered(sizes).reshape(size, len(transfers), 2, size)
        leaving, arriving = rows[:, :, 0], rows[:, :, 1]
        _refuse_if((leaving != arriving.T).any())
        return int(max(leaving.sum((1, 2)).max(), arriving.sum((1, 2)).max()))

    def _gathered(self, numbers: list[int]) -> np.ndarray:
        """Return every rank's numbers, one row for each."""
        rank_numbers = np.array(numbers)
        rows = np.empty((self._comm.size, len(numbers)), rank_numbers.dtype)
        self._arrivals.meet(self._comm.Iallgather(rank_numbers, rows), rows, rank_numbers)
        return rows


def _refuse_if(are_different: np.bool_) -> None:
    if are_different:
        raise CollectiveError(pairwise.DIFFERENT_SIZES)
