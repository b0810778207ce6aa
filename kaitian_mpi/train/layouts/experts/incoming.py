"""The rows that other ranks send in a call, and the order in which this rank takes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kaitian_mpi.train.layouts.experts.headers import Headers
from kaitian_mpi.train.layouts.experts.routes import Trip


class IncomingRows(ABC):
    """The chunks of a call's trips. Nothing here is collective, or waits."""

    def __init__(self, trips: Sequence[Trip]) -> None:
        self.trips = trips

    @abstractmethod
    def next_trip(self) -> Trip | None:
        """Return the trip whose first chunk is to be taken next; None if it is not here yet."""

    def are_all_here(self) -> bool:
        """Return whether every chunk that was not taken has arrived."""
        return all(trip.have_all_arrived() for trip in self.trips)

    def are_all_taken(self) -> bool:
        return all(trip.is_open and not trip.chunks for trip in self.trips)


class RowsInOrder(IncomingRows):
    """Rows of open trips, one trip after the other.

    So the gradients that they add up to are the same each time.
    """

    def next_trip(self) -> Trip | None:
        for trip in self.trips:
            if trip.chunks:
                return trip if trip.has_arrived(trip.chunks[0]) else None
        return None


class RowsAsTheyArrive(IncomingRows):
    """Rows in the order of arrival, of trips that are opened when their headers are here.

    Its methods raise the errors of `Headers.open_trips`.
    """

    def __init__(self, trips: Sequence[Trip], headers: Headers) -> None:
        super().__init__(trips)
        self._headers = headers
        headers.follow(trips)

    def next_trip(self) -> Trip | None:
        self._headers.open_trips(self.trips)
        for trip in self.trips:
            if trip.is_open and trip.chunks and trip.has_arrived(trip.chunks[0]):
                return trip
        return None

    def are_all_here(self) -> bool:
        self._headers.open_trips(self.trips)
        return super().are_all_here()
