"""One forward of a mixture of experts over all ranks, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.layouts.experts.routes import HEADER_TAG, HostTrip, LibraryTrip, Tags, Trip

if TYPE_CHECKING:
    from kaitian_mpi.train.layouts.experts.exchange import TokenExchange

_FACTS = 4  # numbers of a header before those of experts


class Call:
    """The rows that all ranks send to a mixture's experts at one point of a forward.

    What a rank sends to another is cut into chunks of consecutive rows, so that each has rows of
    few experts, and these are computed together. The first message of a call says how many rows of
    which experts follow, without an answer being waited for.
    """

    def __init__(
        self,
        exchange: TokenExchange,
        experts: Experts,
        number: int,
        counts: Sequence[int],
        wanted: Sequence[int],
        is_ignored: bool,
    ) -> None:
        """Prepare the call of this number since the start.

        Args:
            exchange: the ways between the ranks.
            experts: the mixture.
            number: counted from 0.
            counts: this rank's rows by expert, in the exchange's order.
            wanted: those before any were dropped.
            is_ignored: whether this rank's loss does not count.
        """
        self.number = number
        self.mixture = exchange.number_of(experts)
        self.by_expert: list[int] = []
        """What all ranks wanted, in the exchange's order, after `forward`."""
        self._exchange = exchange
        self._experts = experts
        self._counts = list(counts)
        self._wanted = list(wanted)
        self._is_ignored = is_ignored
        self._needs_gradient = torch.is_grad_enabled()
        self._held = exchange.held(self.mixture)
        self._ends = [0, *accumulate(len(held) for held in self._held)]
        self._rows_to = [sum(self._part(self._counts, rank)) for rank in range(exchange.size)]
        self._like = torch.empty(0)
        self._tape: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """The leaf and the output of each chunk computed here, by the rank that sent it."""

    def _part(self, numbers: Sequence[int], rank: int) -> Sequence[int]:
        """Return, of one number for each expert, those of the experts of a rank."""
        return numbers[self._ends[rank] : self._ends[rank + 1]]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs for this rank's rows, in their order. Collective."""
        exchange = self._exchange
        rows = rows.detach().contiguous()
        self._like = rows[:0]
        headers = Headers(self, exchange, self._describe(rows))
        trips = self._make_trips(rows.split(self._rows_to), is_backward=False)
        for trip in trips:
            if isinstance(trip, HostTrip):
                headers.open_when_here(trip)
        replies = self._travel(trips, rows.split(self._rows_to)[exchange.rank], headers)
        self.by_expert = [sum(of_ranks) for of_ranks in zip(*headers.wanted(), strict=True)]
        return torch.cat(replies)

    def _describe(self, rows: torch.Tensor) -> list[int]:
        facts = [self.number, self.mixture, int(self._needs_gradient), rows.dtype.itemsize]
        assert len(facts) == _FACTS
        return [*facts, *self._counts, *self._wanted]

    def check(self, peer: int, header: Sequence[int]) -> None:
        """Check that another rank is at the same call.

        Raises:
            UserError: it is not.
        """
        exchange = self._exchange
        number, mixture, needs_gradient, width = header[:_FACTS]
        name, rank, other = exchange.name(self.mixture), exchange.rank, peer
        rank, other = (exchange.world_rank(one) for one in (rank, other))
        if (number, mixture) != (self.number, self.mixture):
            raise UserError(
                f"--layout experts: rank {other} computes {exchange.name(mixture)} in its call "
                f"{number + 1} of Experts, and rank {rank} computes {name} in its call "
                f"{self.number + 1}; every rank must compute the same ones, in the same order"
            )
        if bool(needs_gradient) != self._needs_gradient:
            raise UserError(
                f"--layout experts: {name} is computed with gradients on one of ranks {rank} and "
                f"{other}, and without on the other; use torch.no_grad() on all ranks or on none"
            )
        if width != self._like.dtype.itemsize:
            raise UserError(
                f"--layout experts: the tokens of {name} have different dtypes on ranks {rank} and "
                f"{other}; use the same precision"
            )

    def chunk_counts(self, header: Sequence[int]) -> list[list[int]]:
        """Return the rows by expert of each chunk that the sender of a header sends here."""
        counts = header[_FACTS : _FACTS + len(self._counts)]
        return cut(self._part(counts, self._exchange.rank), self._exchange.chunks)

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of this rank's rows from that of their outputs. Collective.

        None: nothing here depends on the outputs.

        Raises:
            UserError: it was called before.
        """
        exchange = self._exchange
        exchange.finish_backward(after=self.number)  # in the order in which all ranks are
        exchange.close_call(self, gradient is not None)
        if gradient is None or self._is_ignored:
            gradient = self._like.new_zeros(sum(self._rows_to), *self._like.shape[1:])
        blocks = gradient.contiguous().split(self._rows_to)
        trips = self._make_trips(blocks, is_backward=True)
        for trip in trips:
            trip.expect({peer: self._lengths_from(peer) for peer in trip.peers})
        return torch.cat(self._travel(trips, blocks[exchange.rank]))

    def _lengths_from(self, peer: int) -> list[int]:
        """Return how many rows each chunk of a rank had."""
        return [
            len(self._tape[peer, chunk][0]) if (peer, chunk) in self._tape else 0
            for chunk in range(self._exchange.chunks)
        ]

    def _compute(
        self, peer: int, chunk: int, rows: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the outputs of this rank's experts for rows that a rank sent."""
        if not len(rows):
            return rows
        with torch.set_grad_enabled(self._needs_gradient):
            leaf = rows.detach().requires_grad_(self._needs_gradient)
            output = self._experts.compute(leaf, counts, self._held[self._exchange.rank])
        if self._needs_gradient:
            self._tape[peer, chunk] = leaf, output
        return output.detach()

    def _backpropagate(self, peer: int, chunk: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of rows that a rank sent, from that of their outputs."""
        if not len(gradient):
            return gradient
        leaf, output = self._tape.pop((peer, chunk))
        torch.autograd.backward([output], [gradient])
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def _make_trips(self, blocks: Sequence[torch.Tensor], is_backward: bool) -> list[Trip]:
        """Start to send this rank's blocks, which are by rank."""
        exchange = self._exchange
        tags = Tags.of_call(self.number, is_backward)

        def pieces(peer: int) -> list[torch.Tensor]:
            chunks = cut(self._part(self._counts, peer), exchange.chunks)
            return list(blocks[peer].split([*map(sum, chunks)]))

        trips: list[Trip] = [
            HostTrip(exchange.peers, peer, tags, pieces(peer)) for peer in exchange.hosted
        ]
        if exchange.joined:
            by_rank = {peer: pieces(peer) for peer in exchange.joined if peer != exchange.rank}
            trips.append(
                LibraryTrip(exchange.peers, exchange.group, exchange.joined, exchange.rank, by_rank)
            )
        return trips

    def _travel(
        self, trips: Sequence[Trip], own: torch.Tensor, headers: Headers | None = None
    ) -> list[torch.Tensor]:
        """Compute this rank's rows, and others' as they arrive; return the replies by rank.

        With `headers`, forward, and in the order of arrival; else backward, and in the trips'
        order, as gradients are to be added in the same order each time.
        """
        exchange = self._exchange
        begin, waited = exchange.clock()
        delayed: list[tuple[Trip, int, dict[int, torch.Tensor]]] = []

        def reply_to(peer: int, chunk: int, rows: torch.Tensor) -> torch.Tensor:
            if headers is None:
                return self._backpropagate(peer, chunk, rows)
            own_counts = self._part(self._counts, exchange.rank)
            counts = own_counts if peer == exchange.rank else headers.chunks_of(peer)[chunk]
            return self._compute(peer, chunk, rows, counts)

        def next_trip() -> Trip | None:
            """Return one that has something to compute now."""
            if headers is not None:
                headers.open_libraries(trips)
            for trip in trips:
                if trip.is_open and trip.chunks and trip.has_arrived(trip.chunks[0]):
                    return trip
                if headers is None and trip.chunks:
                    return None
            return None

        if not exchange.hides:
            exchange.wait_until(partial(_all_arrived, trips, headers))
        by_rank = {exchange.rank: reply_to(exchange.rank, 0, own)}
        while not all(trip.is_open and not trip.chunks for trip in trips):
            trip = next_trip()
            if trip is None:
                exchange.wait_until(lambda: next_trip() is not None or _is_over(trips))
                continue
            chunk = trip.chunks[0]
            arrived = trip.take(chunk)
            replies = {peer: reply_to(peer, chunk, rows) for peer, rows in arrived.items()}
            exchange.before_reply()
            if exchange.hides:
                trip.reply(chunk, replies)
            else:
                delayed.append((trip, chunk, replies))
        for trip, chunk, replies in delayed:
            trip.reply(chunk, replies)
        exchange.wait_until(lambda: all(trip.replies_are_here() for trip in trips))
        for trip in trips:
            by_rank |= trip.take_replies()
        exchange.note_travel(begin, waited)
        exchange.keep(trips)
        return [by_rank[rank] for rank in range(exchange.size)]


class Headers:
    """The first messages of a call: each rank's numbers of rows by expert."""

    def __init__(self, call: Call, exchange: TokenExchange, own: Sequence[int]) -> None:
        """Send this rank's to all others, and receive theirs."""
        self._call = call
        self._own = own
        content = torch.tensor(own, dtype=torch.int64)
        self._received = {peer: torch.empty_like(content) for peer in exchange.others}
        self._works: dict[int, Any] = {
            peer: dist.irecv(tensor, peer, tag=HEADER_TAG)
            for peer, tensor in self._received.items()
        }
        self._sent = [dist.isend(content, peer, tag=HEADER_TAG) for peer in exchange.others]
        self._read: dict[int, list[int]] = {}
        self._chunks: dict[int, list[list[int]]] = {}
        self._fault: Exception | None = None

    def open_when_here(self, trip: Trip) -> None:
        """Let a trip receive what its rank sends, while this rank computes.

        It is done by the thread that polls messages.
        """

        def open_trip(future: Any) -> None:
            try:
                future.wait()
                self._open(trip)
            except Exception as error:  # raised where it is waited for
                self._fault = error

        (peer,) = trip.peers
        self._works[peer].get_future().then(open_trip)

    def open_libraries(self, trips: Sequence[Trip]) -> None:
        """Let those trips begin that this thread has to begin, if their headers are here."""
        if self._fault is not None:
            raise self._fault
        for trip in trips:
            is_waiting = isinstance(trip, LibraryTrip) and not trip.is_open
            if is_waiting and all(self._works[peer].is_completed() for peer in trip.peers):
                self._open(trip)

    def _open(self, trip: Trip) -> None:
        trip.expect({peer: [*map(sum, self.chunks_of(peer))] for peer in trip.peers})

    def _read_header(self, peer: int) -> list[int]:
        if peer not in self._read:
            self._works[peer].wait()
            header = self._received[peer].tolist()
            self._call.check(peer, header)
            self._read[peer] = header
        return self._read[peer]

    def chunks_of(self, peer: int) -> list[list[int]]:
        """Return the rows by expert of each chunk that a rank sends here."""
        if peer not in self._chunks:
            self._chunks[peer] = self._call.chunk_counts(self._read_header(peer))
        return self._chunks[peer]

    def wanted(self) -> list[list[int]]:
        """Return how many rows each rank wanted of each expert; all headers are here."""
        size = (len(self._own) - _FACTS) // 2
        headers = [self._own, *(self._read_header(peer) for peer in self._works)]
        return [list(header[-size:]) for header in headers]


def _all_arrived(trips: Sequence[Trip], headers: Headers | None) -> bool:
    if headers is not None:
        headers.open_libraries(trips)
    return all(trip.have_all_arrived() for trip in trips)


def _is_over(trips: Sequence[Trip]) -> bool:
    return all(trip.is_open and not trip.chunks for trip in trips)


def cut(counts: Sequence[int], pieces: int) -> list[list[int]]:
    """Cut consecutive rows of experts into pieces of equal length, as far as that is possible.

    Returns each piece's rows by expert.
    """
    total = sum(counts)
    ends = [0, *accumulate(counts)]
    bounds = [total * piece // pieces for piece in range(pieces + 1)]
    return [
        [
            max(0, min(ends[expert + 1], high) - max(ends[expert], low))
            for expert in range(len(counts))
        ]
        for low, high in pairwise(bounds)
    ]
