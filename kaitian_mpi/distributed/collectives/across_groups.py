"""Reduce-scatters and gathers of several groups: inside each by its library, across them by MPI.

So the parts of each rank cross once to each other group, or as one sum from each, rather than to or
from each of its ranks. All goes in rounds: while MPI moves one, the device has others.

In a group, each member carries its own part, and an equal share of the parts of all other groups'
ranks. A reduce-scatter sums inside the groups, each member what it carries, which then crosses to
the ranks whose parts these are. A gather is the same in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kaitian_mpi.distributed.collectives.staging import contiguous, from_host
from kaitian_mpi.distributed.relay.chunking import COUNT
from kaitian_mpi.mpi import pairwise as messages
from kaitian_mpi.mpi.datatypes import ACCUMULATION_DTYPES, Reduction

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.relay.relay import Relay

Tensors = Sequence[torch.Tensor]

_ROUND_BYTES = 1 << 20
"""The most bytes of all ranks' parts in a round; the device has memory for a few rounds."""
ACROSS_BYTES = COUNT * 2 * _ROUND_BYTES
"""The most device memory that rounds take."""


class PartSlice(NamedTuple):
    """Consecutive elements of a rank's part."""

    rank: int
    begin: int
    end: int


class PieceOperations(NamedTuple):
    """How the members of a group reduce and gather pieces of a flat tensor, one to each member."""

    reduce_pieces: Callable[..., None]
    """Reduces each piece to its member."""
    gather_pieces: Callable[..., None]
    """Copies each member's piece to all members."""


class Members(NamedTuple):
    """The ranks of this rank's own group, and how they reduce and gather inside it."""

    groups: Sequence[Sequence[int]]
    """Of all ranks."""
    ranks: Sequence[int]
    """The ranks of this rank's group."""
    device: torch.device
    """The device on which they do."""
    operations: PieceOperations


def carried(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> dict[int, list[PartSlice]]:
    """Return the pieces of all ranks' parts that each rank carries in its group, by rank.

    A rank's own part comes first. The parts have these lengths. Not collective.
    """
    slices: dict[int, list[PartSlice]] = {}
    for ranks in groups:
        others = [rank for rank in range(len(lengths)) if rank not in ranks]
        ends = [0, *accumulate(lengths[rank] for rank in others)]
        for place, member in enumerate(ranks):
            low, high = (ends[-1] * (place + more) // len(ranks) for more in (0, 1))
            slices[member] = [PartSlice(member, 0, lengths[member])]
            for rank, (begin, end) in zip(others, pairwise(ends), strict=True):
                piece = PartSlice(rank, max(low, begin) - begin, min(high, end) - begin)
                if piece.begin < piece.end:
                    slices[member].append(piece)
    return slices


class _Round:
    """One round of all ranks' parts, in memory that a later round uses again."""

    def __init__(self, members: Members, rank: int, lengths: Sequence[int], memory: Any) -> None:
        self.carried = carried(members.groups, lengths)
        self.rank = rank
        by_member = [self.carried[member] for member in members.ranks]
        self.shares = [sum(end - begin for _, begin, end in pieces) for pieces in by_member]
        self.flat = memory[: sum(self.shares)]
        """The pieces that the group's members carry, one after the other."""
        pieces = [piece for pieces in by_member for piece in pieces]
        views = self.flat.split([end - begin for _, begin, end in pieces])
        self.places = [*zip(pieces, views, strict=True)]
        self.share = self.flat.split(self.shares)[members.ranks.index(rank)]
        self.rank_part, self.other_parts = self.share.split(
            [lengths[rank], len(self.share) - lengths[rank]]
        )
        self.carried_elsewhere = [
            (member, piece)
            for member, pieces in self.carried.items()
            for piece in pieces
            if piece.rank == rank and member not in members.ranks
        ]
        """The pieces of this rank's part that members of other groups carry, by member."""

    def by_rank(self, other_parts: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the pieces of other groups' ranks that this one carries, by rank."""
        pieces = self.carried[self.rank][1:]
        by_rank: list[torch.Tensor | None] = [None] * len(self.carried)
        views = other_parts.split([end - begin for _, begin, end in pieces])
        for piece, view in zip(pieces, views, strict=True):
            by_rank[piece.rank] = view
        return by_rank

    def by_member(self, rank_part: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the pieces of this rank's part that other groups' members carry, by member."""
        by_member: list[torch.Tensor | None] = [None] * len(self.carried)
        for member, piece in self.carried_elsewhere:
            by_member[member] = rank_part[piece.begin : piece.end]
        return by_member


class _Rounds:
    """The rounds of a reduce-scatter or a gather."""

    def __init__(
        self, comm: MPI.Comm, members: Members, relay: Relay, parts: Tensors, dtype: torch.dtype
    ) -> None:
        self._comm = comm
        self._members = members
        self._relay = relay
        self._parts = [part.view(-1) for part in parts]
        lengths = [part.numel() for part in self._parts]
        # A chunk of the relay has what is sent, at most all parts, and what is received.
        round_bytes = min(_ROUND_BYTES, relay.longest_chunk(comm) // 2)
        self._step = max(1, round_bytes // dtype.itemsize // comm.size)
        device = members.device
        starts = range(0, max(lengths), self._step)
        few = min(COUNT, len(starts))
        row_length = comm.size * self._step
        memory = torch.empty((few, row_length), dtype=dtype, device=device)
        self.results = torch.empty((few, self._step), dtype=dtype, device=device)
        # A round without anything to copy out has this, so that the host waits for the device.
        self.nothing = torch.zeros(1, dtype=dtype, device=device)
        self.rounds = []
        for number, start in enumerate(starts):
            left = [min(self._step, max(0, length - start)) for length in lengths]
            self.rounds.append(_Round(members, comm.rank, left, memory[number % few]))

    def part(self, number: int, piece: PartSlice) -> torch.Tensor:
        """Return a piece of a round in the caller's tensors."""
        start = number * self._step
        return self._parts[piece.rank][start + piece.begin : start + piece.end]

    def result(self, number: int) -> torch.Tensor:
        """Return the memory for this rank's sum in a round."""
        return self.results[number % len(self.results)][: len(self.rounds[number].rank_part)]


class _Sums(_Rounds):
    def __init__(
        self, comm: MPI.Comm, members: Members, relay: Relay, parts: Tensors, op: Reduction
    ) -> None:
        # A sum inside the group, too, is rounded once alone.
        dtype = ACCUMULATION_DTYPES.get(parts[0].dtype, parts[0].dtype)
        super().__init__(comm, members, relay, parts, dtype)
        self._op = op
        self._next = 0

    def begin(self, number: int) -> None:
        current = self.rounds[number]
        for piece, place in current.places:
            place.copy_(self.part(number, piece))
        self._members.operations.reduce_pieces(
            current.flat, current.shares, self._op.without_division
        )

    def exchange(self, sent: Tensors, received: Tensors) -> None:
        current = self.rounds[self._next]
        total = self._op.without_division
        self._next += 1
        share = sent[0] if current.share.numel() else sent[0][:0]
        lengths = len(current.rank_part), len(current.other_parts)
        rank_part, other_parts = share.split(lengths)
        others = len(self._members.groups) - 1
        arriving = rank_part.new_empty((others, len(rank_part)))
        rows: list[torch.Tensor | None] = [None] * self._comm.size
        elsewhere = [ranks for ranks in self._members.groups if ranks != self._members.ranks]
        for row, ranks in zip(arriving, elsewhere, strict=True):
            for member, view in enumerate(current.by_member(row)):
                if view is not None and member in ranks:
                    rows[member] = view
        messages.exchange(self._comm, current.by_rank(other_parts), rows)
        if not len(rank_part):
            return
        result = received[0].copy_(rank_part)
        for row in arriving:
            total.combine(result, row, out=result)
        self._op.divide_average(result, self._comm.size)

    def end(self, number: int) -> None:
        result = self.result(number)
        start = number * self._step
        self.output[start : start + len(result)].copy_(result)

    def run(self, output: torch.Tensor) -> None:
        self.output = output
        rounds = [
            (
                [round_.share if round_.share.numel() else self.nothing],
                [self.result(number)] if round_.rank_part.numel() else [],
            )
            for number, round_ in enumerate(self.rounds)
        ]
        self._relay.exchange_in_rounds(rounds, self.exchange, self)


class _Gathers(_Rounds):
    def __init__(
        self,
        comm: MPI.Comm,
        members: Members,
        relay: Relay,
        parts: Tensors,
        rank_part: torch.Tensor,
    ) -> None:
        super().__init__(comm, members, relay, parts, rank_part.dtype)
        self._rank_part = rank_part.view(-1)
        self._next = 0

    def begin(self, number: int) -> None:
        start = number * self._step
        current = self.rounds[number]
        current.rank_part.copy_(self._rank_part[start : start + len(current.rank_part)])

    def exchange(self, sent: Tensors, received: Tensors) -> None:
        current = self.rounds[self._next]
        self._next += 1
        rank_part = sent[0] if current.rank_part.numel() else sent[0][:0]
        other_parts = received[0] if received else rank_part[:0]
        messages.exchange(self._comm, current.by_member(rank_part), current.by_rank(other_parts))

    def end(self, number: int) -> None:
        current = self.rounds[number]
        self._members.operations.gather_pieces(current.flat, current.shares)
        for piece, place in current.places:
            target = self.part(number, piece)
            if piece.rank != self._comm.rank or target.data_ptr() != self._rank_part.data_ptr():
                target.copy_(place)

    def run(self) -> None:
        rounds = [
            (
                [round_.rank_part if round_.rank_part.numel() else self.nothing],
                [round_.other_parts] if round_.other_parts.numel() else [],
            )
            for round_ in self.rounds
        ]
        self._relay.exchange_in_rounds(rounds, self.exchange, self)


def reduce_scatter_across(
    comm: MPI.Comm,
    members: Members,
    relay: Relay,
    output: torch.Tensor,
    pieces: Tensors,
    op: Reduction,
) -> None:
    """Sum `pieces[r]` into `output` on rank r, each group's ranks first. Collective."""
    dense = contiguous(output)
    parts = [contiguous(piece) for piece in pieces]
    _Sums(comm, members, relay, parts, op).run(dense.view(-1))
    from_host(dense, output)


def all_gather_across(
    comm: MPI.Comm, members: Members, relay: Relay, pieces: Tensors, tensor: torch.Tensor
) -> None:
    """Gather every rank's tensor into `pieces`, once into each group. Collective."""
    dense = [contiguous(piece) for piece in pieces]
    _Gathers(comm, members, relay, dense, contiguous(tensor)).run()
    for gathered, piece in zip(dense, pieces, strict=True):
        from_host(gathered, piece)
