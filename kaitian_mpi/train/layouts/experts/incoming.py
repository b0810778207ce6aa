"""The rows that other ranks send in a call, and the order in which this rank takes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kaitian_mpi.train.layouts.experts.dispatch import Dispatch
from kaitian_mpi.train.layouts.experts.headers import Headers


class IncomingRows(ABC):
    """The chunks of a call's dispatches. Nothing here is collective, or waits."""

    def __init__(self, dispatches: Sequence[Dispatch]) -> None:
        self.dispatches = dispatches

    @abstractmethod
    def next_dispatch(self) -> Dispatch | None:
        """Return the dispatch whose first chunk is to be taken next; None if it is not here yet."""

    def are_all_here(self) -> bool:
        """Return whether every chunk that was not taken has arrived."""
        return all(dispatch.have_all_arrived() for dispatch in self.dispatches)

    def are_all_taken(self) -> bool:
        return all(dispatch.is_open and not dispatch.chunks for dispatch in self.dispatches)


class RowsInOrder(IncomingRows):
    """Rows of open dispatches, one dispatch after the other.

    So the gradients that they add up to are the same each time.
    """

    def next_dispatch(self) -> Dispatch | None:
        for dispatch in self.dispatches:
            if dispatch.chunks:
                return dispatch if dispatch.has_arrived(dispatch.chunks[0]) else None
        return None


class RowsAsTheyArrive(IncomingRows):
    """Rows in the order of arrival, of dispatches that are opened when their headers are here.

    Its methods raise the errors of `Headers.open_dispatches`.
    """

    def __init__(self, dispatches: Sequence[Dispatch], headers: Headers) -> None:
        super().__init__(dispatches)
        self._headers = headers
        headers.follow(dispatches)

    def next_dispatch(self) -> Dispatch | None:
        self._headers.open_dispatches(self.dispatches)
        for dispatch in self.dispatches:
            if dispatch.is_open and dispatch.chunks and dispatch.has_arrived(dispatch.chunks[0]):
                return dispatch
        return None

    def are_all_here(self) -> bool:
        self._headers.open_dispatches(self.dispatches)
        return super().are_all_here()
