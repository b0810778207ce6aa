"""Rows that travel to the ranks of their experts and back, while others are computed.

A rank computes its own rows while the first of other ranks are under way, then each chunk as it
arrives, and replies at once. COMET (arXiv 2502.19811) overlaps the two inside a device's kernels;
here they are messages of chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kaitian_mpi.runtime.polling import WaitContext, wait_until
from kaitian_mpi.train.layouts.experts.routes import Routes, Trip

Reply = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Returns the reply to rows, given the rank that sent them and the number of their chunk."""

_WAIT = "tokens of other ranks"


class Opener(Protocol):
    """Opens trips when it is known what arrives."""

    def open_trips(self, trips: Sequence[Trip]) -> None: ...


class Travel:
    """Carries rows and replies, and knows how long that took."""

    def __init__(
        self, routes: Routes, chunks: int, waits: WaitContext, before_reply: Callable[[], None]
    ) -> None:
        """Prepare to carry rows.

        Args:
            routes: the ways between the ranks.
            chunks: see `set_chunks`.
            waits: the context of a wait for other ranks.
            before_reply: called when a reply is computed, before it is sent.
        """
        self.routes = routes
        self.chunks = 1
        """Into how many parts what a rank sends to another is divided."""
        self.waited_sec = 0.0
        """How long this rank has waited so far."""
        self.total_sec = 0.0
        """How long rows were under way so far, and computed."""
        self._hides = True
        self._waits = waits
        self._before_reply = before_reply
        self._under_way: list[Trip] = []
        self.set_chunks(chunks)

    def set_chunks(self, chunks: int) -> None:
        """Divide what a rank sends to another into so many parts; the same on every rank.

        With 0, it is not divided, and all of it arrives before anything is computed.
        """
        self.chunks = max(1, chunks)
        self._hides = chunks > 0

    def carry(
        self,
        trips: Sequence[Trip],
        own: torch.Tensor,
        reply: Reply,
        opener: Opener | None = None,
    ) -> list[torch.Tensor]:
        """Reply to this rank's own rows, and to others' as they arrive. Collective.

        Args:
            trips: begun with this rank's rows.
            own: those that stay here.
            reply: computes a reply.
            opener: says what arrives, while rows are computed in the order of arrival. None: that
                is known, and they are computed in the order of the trips, so that what they add up
                to is the same each time.

        Returns:
            The replies to this rank's rows, by the rank that they were sent to.
        """
        begin, rank = time.perf_counter(), self.routes.rank
        delayed: list[tuple[Trip, int, dict[int, torch.Tensor]]] = []

        def ready() -> Trip | None:
            """Return a trip of which a chunk is here."""
            if opener is not None:
                opener.open_trips(trips)
            for trip in trips:
                if trip.is_open and trip.chunks and trip.has_arrived(trip.chunks[0]):
                    return trip
                if opener is None and trip.chunks:
                    return None
            return None

        def is_all_here() -> bool:
            ready()
            return all(trip.have_all_arrived() for trip in trips)

        if not self._hides:
            self._wait_until(is_all_here)
        by_rank = {rank: reply(rank, 0, own)}
        while not _are_taken(trips):
            self._wait_until(lambda: ready() is not None or _are_taken(trips))
            trip = ready()
            if trip is None:
                continue
            chunk = trip.chunks[0]
            replies = {peer: reply(peer, chunk, rows) for peer, rows in trip.take(chunk).items()}
            self._before_reply()
            if self._hides:
                trip.reply(chunk, replies)
            else:
                delayed.append((trip, chunk, replies))
        for trip, chunk, replies in delayed:
            trip.reply(chunk, replies)
        self._wait_until(lambda: all(trip.replies_are_here() for trip in trips))
        for trip in trips:
            by_rank |= trip.take_replies()
        self.total_sec += time.perf_counter() - begin
        # What was sent stays until it has arrived.
        self._under_way = [trip for trip in (*self._under_way, *trips) if not trip.is_over()]
        return [by_rank[rank] for rank in range(self.routes.size)]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for other ranks, unless it is true already."""
        if condition():
            return
        with self._waits(_WAIT):
            begin = time.perf_counter()
            wait_until(condition)
            self.waited_sec += time.perf_counter() - begin

    def close(self) -> None:
        """Forget what is under way, and end the routes. Not collective."""
        self._under_way = []
        self.routes.close()


def _are_taken(trips: Sequence[Trip]) -> bool:
    return all(trip.is_open and not trip.chunks for trip in trips)
