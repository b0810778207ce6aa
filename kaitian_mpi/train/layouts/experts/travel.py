"""Rows that travel to the ranks of their experts and back, while others are computed.

A rank computes its own rows while the first of other ranks are under way, then each chunk as it
arrives, and replies at once. COMET (arXiv 2502.19811) overlaps the two inside a device's kernels;
here they are messages of chunks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.runtime.polling import WaitContext, wait_until
from kaitian_mpi.train.layouts.experts.arrivals import COMPUTING
from kaitian_mpi.train.layouts.experts.routes import Routes, Trip

Reply = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Returns the reply to rows, given the rank that sent them and the number of their chunk."""

_WAIT = "tokens of other ranks"


class Opener(Protocol):
    """Opens trips when it is known what arrives."""

    def open_trips(self, trips: Sequence[Trip]) -> None: ...


class Travel:
    """Carries rows and replies, and measures how long that takes."""

    def __init__(
        self,
        routes: Routes,
        chunks: int,
        waits: WaitContext,
        catch_up: Callable[[], None],
        mark: Callable[[], Mark],
    ) -> None:
        """Prepare to carry rows.

        Args:
            routes: the ways between the ranks.
            chunks: see `set_chunks`.
            waits: the context of a wait for other ranks.
            catch_up: called when something is computed, before it is sent.
            mark: returns a point in this rank's device's work.
        """
        self.routes = routes
        self.chunks = 1
        """Into how many parts what a rank sends to another is divided."""
        self.waited_sec = 0.0
        """How long this rank has waited so far."""
        self.total_sec = 0.0
        """How long rows were under way or computed so far."""
        self.computed_sec = 0.0
        """How long this rank's device has computed replies, as far as it has finished them."""
        self._hides = True
        self._waits = waits
        self.catch_up = catch_up
        self._mark = mark
        self._computed: deque[tuple[Mark, Mark]] = deque()
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
        own_rows: torch.Tensor,
        reply: Reply,
        opener: Opener | None = None,
    ) -> list[torch.Tensor]:
        """Reply to this rank's own rows, and to others' as they arrive. Collective.

        Args:
            trips: begun with this rank's rows.
            own_rows: those whose experts are on this rank.
            reply: computes a reply.
            opener: opens the trips when their headers arrive; rows are computed in the order of
                arrival. None: the trips are open, and rows are computed in the order of the trips,
                so that the gradients that they add up to are the same each time.

        Returns:
            The replies to this rank's rows, by the rank that they were sent to.
        """
        begin = time.perf_counter()
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
        by_rank = self._compute(reply, 0, {self.routes.rank: own_rows})
        while not _are_taken(trips):
            self._wait_until(lambda: ready() is not None or _are_taken(trips))
            trip = ready()
            if trip is None:
                continue
            chunk = trip.chunks[0]
            replies = self._compute(reply, chunk, trip.take(chunk))
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
        while self._computed and self._computed[0][1].is_reached():
            since, to = self._computed.popleft()
            self.computed_sec += to.seconds_since(since)
        # What was sent stays until it has arrived.
        self._under_way = [trip for trip in (*self._under_way, *trips) if not trip.is_over()]
        return [by_rank[rank] for rank in range(self.routes.size)]

    def _compute(
        self, reply: Reply, chunk: int, rows: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the replies to a chunk's rows, by the rank that sent them."""
        since = self._mark()
        replies = {peer: reply(peer, chunk, sent) for peer, sent in rows.items()}
        self.catch_up()
        to = self._mark()
        self._computed.append((since, to))
        current = recorder.current
        if current is not None and current.is_recording:
            others = [self.routes.world_rank(peer) for peer in rows if peer != self.routes.rank]
            senders = f"chunk {chunk} of rank {', '.join(map(str, others))}"
            current.add_device_span(COMPUTING, senders if others else "own tokens", since, to)
        return replies

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
