"""The sizes of the ranks' tensors, which are compared where long ones go in rounds.

A rank with others would do another number of rounds, and its messages would be taken for those of
the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi import pairwise
from kaitian_mpi.mpi.datatypes import as_raw_buffer

if TYPE_CHECKING:
    from mpi4py import MPI

Tensors = Sequence[torch.Tensor | None]


class Sizes:
    """Compares the ranks' sizes; every method is collective, and raises on every rank."""

    def __init__(self, comm: MPI.Intracomm, complete: Callable[..., None]) -> None:
        """`complete` waits for a request on tensors, asleep."""
        self._comm = comm
        self._complete = complete

    def gathered(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return every rank's numbers, one row for each."""
        own = torch.tensor(numbers)
        rows = torch.zeros((self._comm.size, len(own)), dtype=torch.int64)
        self._complete(self._comm.Iallgather(as_raw_buffer(own), as_raw_buffer(rows)), rows, own)
        return rows

    def check_equal(self, sizes: Sequence[int]) -> None:
        """Raise a `CollectiveError` if the ranks have unlike sizes."""
        rows = self.gathered(sizes)
        _refuse_if((rows != rows[0]).any())

    def check_gather(self, pieces: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Raise a `CollectiveError` if some rank's list is not of the ranks' sizes."""
        rows = self.gathered([*(piece.nbytes for piece in pieces), tensor.nbytes])
        _refuse_if((rows[:, :-1] != rows[:, -1]).any())

    def are_long(self, received: Tensors, sent: Tensors, most: int) -> bool:
        """Return whether any rank receives or sends more bytes than this.

        Raises:
            CollectiveError: some do, and one sends another what that does not receive.
        """
        sizes = [
            [0 if piece is None else piece.nbytes for piece in pieces or [None] * self._comm.size]
            for pieces in (sent, received)
        ]
        leaving, arriving = self.gathered(sizes[0] + sizes[1]).split(self._comm.size, dim=1)
        if max(leaving.sum(1).max(), arriving.sum(1).max()) <= most:
            return False
        _refuse_if((leaving != arriving.t()).any())
        return True


def _refuse_if(are_unlike: torch.Tensor | bool) -> None:
    if are_unlike:
        raise CollectiveError(pairwise.UNLIKE_SIZES)
