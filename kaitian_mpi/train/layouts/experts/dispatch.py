"""Sends rows to the ranks that hold their experts, and the replies back, in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.errors import RankLostError
from kaitian_mpi.mpi.topology import are_joined_by_library
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.train.layouts.experts.arrivals import Arrivals
from kaitian_mpi.train.layouts.peers import HostMessage, PeerGroups

Size = tuple[int, ...]


class Tags(NamedTuple):
    """The tags of the messages of one call and direction."""

    rows: int
    replies: int

    @classmethod
    def of_call(cls, number: int, is_backward: bool) -> Tags:
        """Return those of a call of a mixture, counted from 0, in one direction."""
        first = HEADER_TAG + 1 + 4 * (number % _MAX_CALLS) + 2 * is_backward
        return cls(first, first + 1)


HEADER_TAG = 1 << 16  # beyond those of a script's own messages
_MAX_CALLS = 1 << 24  # MPICH's tags end at 2**28


class Dispatch(ABC):
    """Rows for some other ranks and their replies, and the rows that these send here, in chunks.

    A reply has the shape of its rows.
    """

    peers: tuple[int, ...]
    is_open: bool = False
    """Whether it is known what arrives: `expect` was called."""

    @abstractmethod
    def expect(self, counts: Mapping[int, Sequence[int]]) -> None:
        """Receive rows: of each peer, so many in each chunk. Not collective."""

    def have_all_arrived(self) -> bool:
        """Return whether all rows that are sent to this rank are here. Not collective."""
        return self.is_open and all(self.has_arrived(chunk) for chunk in self.chunks)

    @property
    @abstractmethod
    def chunks(self) -> Sequence[int]:
        """The numbers of the chunks that were not taken, in order; `expect` was called."""

    @abstractmethod
    def has_arrived(self, chunk: int) -> bool:
        """Return whether a chunk's rows are here. Not collective."""

    @abstractmethod
    def take(self, chunk: int) -> dict[int, torch.Tensor]:
        """Return a chunk's rows by the rank that sent them, waiting for them."""

    @abstractmethod
    def reply(self, chunk: int, replies: Mapping[int, torch.Tensor]) -> None:
        """Send the replies to a chunk, in the chunks' order."""

    @abstractmethod
    def replies_are_here(self) -> bool:
        """Return whether all replies to this rank's rows have arrived. Not collective."""

    @abstractmethod
    def take_replies(self) -> dict[int, torch.Tensor]:
        """Return the replies to this rank's rows by the rank that sent them, waiting for them."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether everything sent has arrived, so that its memory can be freed."""


class HostDispatch(Dispatch):
    """Between this rank and one other, by MPI through host memory."""

    def __init__(
        self,
        peers: PeerGroups,
        peer: int,
        world_rank: int,
        tags: Tags,
        pieces: Sequence[torch.Tensor],
    ) -> None:
        """Send this rank's pieces to a peer, and receive their replies."""
        self.peers = (peer,)
        self._groups = peers
        self._peer = peer
        self._tags = tags
        self._like = pieces[0]
        self._incoming: dict[int, tuple[torch.Tensor, HostMessage]] = {}
        self._sent: list[Any] = [
            dist.isend(piece, peer, tag=tags.rows) for piece in pieces if len(piece)
        ]
        self._arriving_rows = Arrivals(f"tokens from rank {world_rank}")
        arriving = Arrivals(f"outputs from rank {world_rank}")
        self._replies = [
            self._receive(piece.shape, tags.replies, arriving, chunk)
            for chunk, piece in enumerate(pieces)
            if len(piece)
        ]

    def _receive(
        self, shape: Size, tag: int, arriving: Arrivals, chunk: int
    ) -> tuple[torch.Tensor, HostMessage]:
        with self._groups.beside_computing():
            tensor = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
            message = HostMessage(tensor, self._peer, tag)
        arriving.follow(message, chunk, tensor.nbytes)
        return tensor, message

    def expect(self, counts: Mapping[int, Sequence[int]]) -> None:
        width = self._like.shape[1:]
        self._incoming = {
            chunk: self._receive((count, *width), self._tags.rows, self._arriving_rows, chunk)
            for chunk, count in enumerate(counts[self._peer])
            if count
        }
        self.is_open = True

    @property
    def chunks(self) -> Sequence[int]:
        return [*self._incoming]

    def has_arrived(self, chunk: int) -> bool:
        return self._incoming[chunk][1].is_completed()

    def take(self, chunk: int) -> dict[int, torch.Tensor]:
        tensor, message = self._incoming.pop(chunk)
        message.wait()
        return {self._peer: tensor}

    def reply(self, chunk: int, replies: Mapping[int, torch.Tensor]) -> None:
        tensor = replies[self._peer].contiguous()
        self._sent.append(dist.isend(tensor, self._peer, tag=self._tags.replies))

    def replies_are_here(self) -> bool:
        return all(message.is_completed() for _, message in self._replies)

    def take_replies(self) -> dict[int, torch.Tensor]:
        for _, message in self._replies:
            message.wait()
        pieces = [tensor for tensor, _ in self._replies]
        self._replies = []
        return {self._peer: torch.cat(pieces) if pieces else self._like[:0]}

    def is_over(self) -> bool:
        return all(work.is_completed() for work in self._sent)


class LibraryDispatch(Dispatch):
    """Among all ranks of a kind, by its library's all-to-all.

    A library carries out a group's calls in order: all chunks of rows, then all of replies.
    """

    def __init__(
        self,
        peers: PeerGroups,
        group: Any,
        ranks: Sequence[int],
        rank: int,
        pieces: Mapping[int, list[torch.Tensor]],
    ) -> None:
        """Prepare to send this rank's pieces, by the other ranks of the group."""
        self.peers = tuple(other for other in ranks if other != rank)
        self._groups = peers
        self._group = group
        self._ranks = ranks
        like = pieces[self.peers[0]][0]
        self._like = like[:0]
        count = len(pieces[self.peers[0]])
        self._sent_counts = [
            [0 if other == rank else len(pieces[other][chunk]) for other in ranks]
            for chunk in range(count)
        ]
        self._pieces = [
            torch.cat([pieces[other][chunk] for other in self.peers]) for chunk in range(count)
        ]
        self._packed = peers.mark()
        self._taken = 0
        self._counts: list[list[int]] = []
        self._incoming: list[tuple[torch.Tensor, Any]] = []
        self._replies: list[tuple[torch.Tensor, Any]] = []

    def expect(self, counts: Mapping[int, Sequence[int]]) -> None:
        for chunk, piece in enumerate(self._pieces):
            received = [counts[other][chunk] if other in counts else 0 for other in self._ranks]
            self._counts.append(received)
            with self._groups.beside_computing(self._packed):
                self._incoming.append(self._exchange(piece, self._sent_counts[chunk], received))
        self.is_open = True

    def _exchange(
        self, tensor: torch.Tensor, sent: list[int], received: list[int]
    ) -> tuple[torch.Tensor, Any]:
        arriving = tensor.new_empty((sum(received), *tensor.shape[1:]))
        return arriving, dist.all_to_all_single(
            arriving, tensor, received, sent, group=self._group, async_op=True
        )

    def _wait(self, tensor: torch.Tensor, work: Any) -> torch.Tensor:
        """Wait for what a library brings, on the host: so it is seen if a rank is lost."""
        wait_until(lambda: self._group.is_broken or bool(work.is_completed()))
        if self._group.is_broken:
            raise RankLostError("a rank was lost while tokens were under way to their experts")
        work.wait()
        if not tensor.is_cpu:
            keep_for_current_stream(tensor)
        return tensor

    @property
    def chunks(self) -> Sequence[int]:
        return range(self._taken, len(self._incoming))

    def has_arrived(self, chunk: int) -> bool:
        return self._group.is_broken or bool(self._incoming[chunk][1].is_completed())

    def take(self, chunk: int) -> dict[int, torch.Tensor]:
        arrived = self._wait(*self._incoming[chunk])
        self._taken = chunk + 1
        parts = arrived.split(self._counts[chunk])
        return {rank: part for rank, part in zip(self._ranks, parts, strict=True) if len(part)}

    def reply(self, chunk: int, replies: Mapping[int, torch.Tensor]) -> None:
        tensors = [replies[rank] for rank in self._ranks if rank in replies]
        sent = torch.cat(tensors) if tensors else self._like
        counts = self._sent_counts[chunk]
        self._replies.append(self._exchange(sent, self._counts[chunk], counts))

    def replies_are_here(self) -> bool:
        return self._group.is_broken or all(work.is_completed() for _, work in self._replies)

    def take_replies(self) -> dict[int, torch.Tensor]:
        by_rank: dict[int, list[torch.Tensor]] = {peer: [self._like] for peer in self.peers}
        for (tensor, work), counts in zip(self._replies, self._sent_counts, strict=True):
            self._wait(tensor, work)
            for rank, part in zip(self._ranks, tensor.split(counts), strict=True):
                if len(part):
                    by_rank[rank].append(part)
        return {peer: torch.cat(parts) for peer, parts in by_rank.items()}

    def is_over(self) -> bool:
        return self.replies_are_here()


class DispatchLinks:
    """Connects this rank with the others: within its kind by a library, else by MPI."""

    def __init__(self, world: World) -> None:
        """Make the group of each kind that a library joins. Collective."""
        self.rank = world.rank
        self.size = world.size
        self.others = [rank for rank in range(world.size) if rank != world.rank]
        """All ranks but this one."""
        self._world_ranks = [info.world_rank for info in world.infos]
        self._peers = PeerGroups(world.rank, world.device)
        self._group, self.joined = _join_kind(world)
        """The ranks of this one's kind, with itself, if a library joins them."""
        self._hosted = [rank for rank in self.others if rank not in self.joined]

    def world_rank(self, rank: int) -> int:
        """Return a rank's number in the whole job."""
        return self._world_ranks[rank]

    def world_ranks_with(self, peer: int) -> tuple[int, int]:
        """Return the numbers of this rank and of a peer in the whole job, to name both."""
        return self.world_rank(self.rank), self.world_rank(peer)

    def dispatch(self, tags: Tags, pieces: Callable[[int], list[torch.Tensor]]) -> list[Dispatch]:
        """Begin to send rows to all other ranks; `pieces` returns the chunks for one of them."""
        dispatches: list[Dispatch] = [
            HostDispatch(self._peers, peer, self.world_rank(peer), tags, pieces(peer))
            for peer in self._hosted
        ]
        if self.joined:
            by_rank = {peer: pieces(peer) for peer in self.joined if peer != self.rank}
            dispatches.append(
                LibraryDispatch(self._peers, self._group, self.joined, self.rank, by_rank)
            )
        return dispatches

    def close(self) -> None:
        """End the group of this kind. Not collective."""
        self._peers.close()
        group = self._group
        self._group = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _join_kind(world: World) -> tuple[Any, list[int]]:
    """Return the group of this rank's kind, if a library joins it, and its ranks. Collective."""
    group_and_ranks: tuple[Any, list[int]] = (None, [])
    for kind in sorted(set(world.kinds)):
        ranks = [rank for rank, other in enumerate(world.kinds) if other == kind]
        if len(ranks) > 1 and are_joined_by_library([world.infos[rank] for rank in ranks]):
            group = dist.new_group(ranks)
            if world.rank in ranks:
                group_and_ranks = group, ranks
    return group_and_ranks
