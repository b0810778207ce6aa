"""The first messages of a call of a mixture: how many rows of which experts follow.

Nobody waits for an answer to them: the rows are sent at once. One more says that forwards are over,
so that a rank that computes a mixture more than another does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.layouts.experts.dispatch import (
    HEADER_TAG,
    Dispatch,
    DispatchLinks,
    HostDispatch,
)
from kaitian_mpi.train.layouts.experts.places import ExpertPlaces

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What tokens can be of."""
_NO_MIXTURE = -1
_FACTS = 5


class CallHeader(NamedTuple):
    """Announces the rows that a rank sends in a call."""

    number: int
    """Of the call since the start, from 0."""
    mixture: int
    """Its number in the model; -1: the rank computes no mixture for now."""
    needs_gradient: int = 0
    dtype: int = 0
    """Of its rows, as its place in `DTYPES`."""
    counts: Sequence[int] = ()
    """Its rows by expert, in the order of `ExpertPlaces`."""
    wanted: Sequence[int] = ()
    """Those before any were dropped."""

    @classmethod
    def of_end(cls, number: int) -> CallHeader:
        """Return the header that ends forwards; the end has a number of its own, like a call."""
        return cls(number, _NO_MIXTURE)

    def pack(self, most_experts: int) -> torch.Tensor:
        """Return the header as an int64 tensor.

        Its length depends on `most_experts` only, as a receiver does not know the mixture yet.
        """
        packed = torch.zeros(_FACTS + 2 * most_experts, dtype=torch.int64)
        facts = [self.number, self.mixture, self.needs_gradient, self.dtype, len(self.counts)]
        numbers = [*facts, *self.counts, *self.wanted]
        packed[: len(numbers)] = torch.tensor(numbers)
        return packed

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> CallHeader:
        """Return the header that `pack` has packed."""
        number, mixture, needs_gradient, dtype, experts, *numbers = packed.tolist()
        counts = numbers[:experts]
        wanted = numbers[experts : 2 * experts]
        return cls(number, mixture, needs_gradient, dtype, counts, wanted)


class Headers:
    """The headers of all other ranks in one call."""

    def __init__(
        self,
        links: DispatchLinks,
        places: ExpertPlaces,
        rank_header: CallHeader,
        check: Callable[[int, CallHeader], None] | None = None,
        cut: Callable[[Sequence[int]], list[list[int]]] | None = None,
    ) -> None:
        """Send this rank's header to all others, and receive theirs. Nobody waits.

        Args:
            links: the connections between the ranks.
            places: of the experts.
            rank_header: this rank's.
            check: raises an error if a rank's header of the same call does not fit this rank's.
            cut: returns the rows by expert of each chunk that is sent here, given the `counts` of
                the sender's header.
        """
        self._links = links
        self._places = places
        self._rank_header = rank_header
        self._check = check
        self._cut = cut
        content = rank_header.pack(places.most_experts)
        self._received = {peer: torch.empty_like(content) for peer in links.others}
        self._works: dict[int, Any] = {
            peer: dist.irecv(tensor, peer, tag=HEADER_TAG)
            for peer, tensor in self._received.items()
        }
        self._sent = [dist.isend(content, peer, tag=HEADER_TAG) for peer in links.others]
        self._headers: dict[int, CallHeader] = {}
        self._chunks: dict[int, list[list[int]]] = {}
        self._fault: Exception | None = None

    def follow(self, dispatches: Sequence[Dispatch]) -> None:
        """Open dispatches by MPI when their headers arrive, while this rank computes.

        It is done by the thread that polls messages.
        """
        for dispatch in dispatches:
            if isinstance(dispatch, HostDispatch):
                (peer,) = dispatch.peers
                self._works[peer].get_future().then(
                    lambda future, dispatch=dispatch: self._follow(dispatch)
                )

    def _follow(self, dispatch: Dispatch) -> None:
        try:
            self._open(dispatch)
        except Exception as error:  # raised where it is waited for
            self._fault = error

    def open_dispatches(self, dispatches: Sequence[Dispatch]) -> None:
        """Open those dispatches that only this thread may begin, if their headers are here.

        Raises:
            UserError: a header does not fit.
            CollectiveError: a rank was lost.
        """
        if self._fault is not None:
            raise self._fault
        for dispatch in dispatches:
            is_waiting = not (dispatch.is_open or isinstance(dispatch, HostDispatch))
            if is_waiting and all(self._works[peer].is_completed() for peer in dispatch.peers):
                self._open(dispatch)

    def _open(self, dispatch: Dispatch) -> None:
        dispatch.expect({peer: [*map(sum, self.chunks_of(peer))] for peer in dispatch.peers})

    def chunks_of(self, peer: int) -> list[list[int]]:
        """Return the rows by expert of each chunk that a rank sends here."""
        if peer not in self._chunks:
            assert self._cut is not None
            self._chunks[peer] = self._cut(self.header_of(peer).counts)
        return self._chunks[peer]

    def header_of(self, peer: int) -> CallHeader:
        """Return a rank's header, waiting for it."""
        if peer not in self._headers:
            self._works[peer].wait()
            header = CallHeader.unpack(self._received[peer])
            self._check_order(peer, header)
            if self._check is not None:
                self._check(peer, header)
            self._headers[peer] = header
        return self._headers[peer]

    def check_arrived(self) -> None:
        """Check the headers that are here.

        Raises:
            UserError: one does not fit.
        """
        for peer, work in self._works.items():
            if work.is_completed():
                self.header_of(peer)

    def _check_order(self, peer: int, header: CallHeader) -> None:
        """Check that another rank is at the same call.

        Raises:
            UserError: it is not.
        """
        expected = self._rank_header
        if (header.number, header.mixture) != (expected.number, expected.mixture):
            rank, other = self._links.world_ranks_with(peer)
            raise UserError(
                f"--layout experts: rank {other} {self._activity(header)}, while rank {rank} "
                f"{self._activity(expected)}; every rank must compute the same Experts, in the "
                "same order"
            )

    def _activity(self, header: CallHeader) -> str:
        if header.mixture == _NO_MIXTURE:
            return "computes no further Experts"
        return f"computes {self._places.name(header.mixture)!r}"
