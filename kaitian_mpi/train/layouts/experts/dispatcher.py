"""Exchanges rows and replies with the ranks of their experts, while others are computed.

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
from kaitian_mpi.train.layouts.experts.dispatch import Dispatch, DispatchLinks
from kaitian_mpi.train.layouts.experts.incoming import IncomingRows

Reply = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Returns the reply to rows, given the rank that sent them and the number of their chunk."""

_WAIT = "tokens of other ranks"


class Dispatcher:
    """Dispatches rows and returns their replies, and measures how long that takes."""

    def __init__(
        self,
        links: DispatchLinks,
        chunks: int,
        waits: WaitContext,
        catch_up: Callable[[], None],
        mark: Callable[[], Mark],
    ) -> None:
        """Prepare to dispatch rows.

        Args:
            links: the connections between the ranks.
            chunks: see `set_chunks`.
            waits: the context of a wait for other ranks.
            catch_up: called when something is computed, before it is sent.
            mark: returns a point in this rank's device's work.
        """
        self.links = links
        self.chunks = 1
        """Into how many parts what a rank sends to another is divided."""
        self.waited_sec = 0.0
        """How long this rank has waited so far."""
        self.total_sec = 0.0
        """How long rows were under way or computed so far."""
        self.computed_sec = 0.0
        """How long this rank's device has computed replies, as far as it has finished them."""
        self._overlaps = True
        self._waits = waits
        self.catch_up = catch_up
        self._mark = mark
        self._computed: deque[tuple[Mark, Mark]] = deque()
        self._under_way: list[Dispatch] = []
        self.set_chunks(chunks)

    def set_chunks(self, chunks: int) -> None:
        """Divide what a rank sends to another into so many parts; the same on every rank.

        With 0, it is not divided, and all of it arrives before anything is computed.
        """
        self.chunks = max(1, chunks)
        self._overlaps = chunks > 0

    def run(
        self, incoming: IncomingRows, own_rows: torch.Tensor, reply: Reply
    ) -> list[torch.Tensor]:
        """Reply to this rank's own rows, and to those of others as they come. Collective.

        Args:
            incoming: the rows of others, whose dispatches have begun to send this rank's rows.
            own_rows: those whose experts are on this rank.
            reply: computes a reply.

        Returns:
            The replies to this rank's rows, by the rank that they were sent to.
        """
        begin = time.perf_counter()
        if not self._overlaps:
            self._wait_until(incoming.are_all_here)
        by_rank = self._compute(reply, 0, {self.links.rank: own_rows})
        delayed: list[Callable[[], None]] = []
        while (dispatch := self._wait_for_next(incoming)) is not None:
            chunk = dispatch.chunks[0]
            replies = self._compute(reply, chunk, dispatch.take(chunk))
            if self._overlaps:
                dispatch.reply(chunk, replies)
            else:
                delayed.append(partial(dispatch.reply, chunk, replies))
        for send_replies in delayed:
            send_replies()
        dispatches = incoming.dispatches
        self._wait_until(lambda: all(dispatch.replies_are_here() for dispatch in dispatches))
        for dispatch in dispatches:
            by_rank |= dispatch.take_replies()
        self.total_sec += time.perf_counter() - begin
        self._add_computed_sec()
        # What was sent stays until it has arrived.
        self._under_way = [
            dispatch for dispatch in (*self._under_way, *dispatches) if not dispatch.is_over()
        ]
        return [by_rank[rank] for rank in range(self.links.size)]

    def _wait_for_next(self, incoming: IncomingRows) -> Dispatch | None:
        """Return the dispatch with the next chunk, once it is here; None if all were taken."""
        self._wait_until(lambda: incoming.next_dispatch() is not None or incoming.are_all_taken())
        return incoming.next_dispatch()

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
            others = [self.links.world_rank(peer) for peer in rows if peer != self.links.rank]
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
        """Forget what is under way, and end the links. Not collective."""
        self._under_way = []
        self.links.close()
