"""Rows that travel to the ranks of their experts and back, while others are computed.

A rank computes its own rows while the first of other ranks are under way, then each chunk as it
arrives, and replies at once. COMET (arXiv 2502.19811) overlaps the two inside a device's kernels;
here they are messages of chunks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.runtime.polling import WaitContext, wait_until
from kaitian_mpi.train.layouts.experts.arrivals import COMPUTING
from kaitian_mpi.train.layouts.experts.incoming import IncomingRows
from kaitian_mpi.train.layouts.experts.routes import Routes, Trip

Reply = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Returns the reply to rows, given the rank that sent them and the number of their chunk."""

_WAIT = "tokens of other ranks"


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
        self, incoming: IncomingRows, own_rows: torch.Tensor, reply: Reply
    ) -> list[torch.Tensor]:
        """Reply to this rank's own rows, and to those of others as they come. Collective.

        Args:
            incoming: the rows of others, on trips that have begun with this rank's rows.
            own_rows: those whose experts are on this rank.
            reply: computes a reply.

        Returns:
            The replies to this rank's rows, by the rank that they were sent to.
        """
        begin = time.perf_counter()
        if not self._hides:
            self._wait_until(incoming.are_all_here)
        by_rank = self._compute(reply, 0, {self.routes.rank: own_rows})
        delayed: list[Callable[[], None]] = []
        while (trip := self._wait_for_next(incoming)) is not None:
            chunk = trip.chunks[0]
            replies = self._compute(reply, chunk, trip.take(chunk))
            if self._hides:
                trip.reply(chunk, replies)
            else:
                delayed.append(partial(trip.reply, chunk, replies))
        for send_replies in delayed:
            send_replies()
        trips = incoming.trips
        self._wait_until(lambda: all(trip.replies_are_here() for trip in trips))
        for trip in trips:
            by_rank |= trip.take_replies()
        self.total_sec += time.perf_counter() - begin
        self._add_computed_sec()
        # What was sent stays until it has arrived.
        self._under_way = [trip for trip in (*self._under_way, *trips) if not trip.is_over()]
        return [by_rank[rank] for rank in range(self.routes.size)]

    def _wait_for_next(self, incoming: IncomingRows) -> Trip | None:
        """Return the trip to take a chunk of, when it is here; None if all chunks were taken."""
        self._wait_until(lambda: incoming.next_trip() is not None or incoming.are_all_taken())
        return incoming.next_trip()

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

    def _add_computed_sec(self) -> None:
        """Add the time of the replies that the device has finished since the last call."""
        while self._computed and self._computed[0][1].is_reached():
            since, to = self._computed.popleft()
            self.computed_sec += to.seconds_since(since)

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
