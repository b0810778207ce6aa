"""Messages between two ranks: by the library of their device kind if there is one, else by MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.balance.pipeline import Stage
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.errors import RankLostError
from kaitian_mpi.mpi.topology import are_joined_by_library
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import wait_until


class LibraryMessage:
    """A message that a library carries, which keeps its tensor until it is completed."""

    def __init__(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        """Start it, on both ranks, after the work queued on the current stream."""
        self._tensor = tensor
        self._group = group
        self._work: Any = dist.broadcast(tensor, source, group=group, async_op=True)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Block the host until it is completed, as a message by MPI does.

        So waiting is seen and limited, and no stream of this rank waits for another rank.
        """
        wait_until(lambda: self._group.is_broken or self.is_completed())
        if self._group.is_broken:
            raise RankLostError("a rank was lost during a message between stages")
        self._work.wait()
        if not self._tensor.is_cpu:
            keep_for_current_stream(self._tensor)


class HostMessage:
    """A tensor that is received through host memory."""

    def __init__(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Post the receive; on a device, the copy in comes after the current stream's work."""
        self._tensor = tensor
        self._work = cast("Work", dist.irecv(tensor, source, tag=tag))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def when_completed(self, callback: Callable[[], None]) -> None:
        """Call this then, in the thread that receives messages."""
        self._work.get_future().then(lambda _: callback())

    def wait(self) -> None:
        """Block the host until it has come; the current stream waits for the copy in."""
        self._work.wait()
        if not self._tensor.is_cpu:
            keep_for_current_stream(self._tensor)


class PeerGroups:
    """This rank's messages with others.

    Where a library carries them, there are groups of this rank and one other each, in which one of
    the two sends: a broadcast in a group of two is a message. A library carries out a group's calls
    in order, so each direction has a group of its own: activations and gradients come in different
    orders on the two ranks. Only the thread that computes starts such messages, as the library must
    be called for all groups in one order.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        groups: Mapping[tuple[int, int], Any] = MappingProxyType({}),
    ) -> None:
        """Take this rank's groups, by sender and receiver; MPI carries all else."""
        self._rank = rank
        self._device = device
        self._groups = dict(groups)
        self._module = device_of(device).streams()
        self._stream: Any = None if self._module is None else self._module.Stream(device)

    def joins(self, peer: int) -> bool:
        """Return whether a library carries messages between this rank and another."""
        return (peer, self._rank) in self._groups

    def send_to(self, target: int, tensor: torch.Tensor, tag: int) -> Any:
        """Start sending a tensor, which must not change until the work returned is completed.

        `tag` is that of the receive, for MPI.
        """
        if self.joins(target):
            return LibraryMessage(tensor, self._rank, self._groups[self._rank, target])
        return dist.isend(tensor, target, tag=tag)

    def receive_from(
        self, source: int, tensor: torch.Tensor, tag: int
    ) -> LibraryMessage | HostMessage:
        """Start receiving in a tensor that was made inside `beside_computing`, and call it there.

        By a library, to be called in the order in which the source sends.
        """
        if self.joins(source):
            return LibraryMessage(tensor, source, self._groups[source, self._rank])
        return HostMessage(tensor, source, tag)

    def mark(self) -> Any:
        """Return the point that computation is queued up to, for `beside_computing`."""
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    @contextmanager
    def beside_computing(self, after: Any = None) -> Iterator[None]:
        """Let tensors be made, and received, on a stream that does not wait for computation.

        But for what was queued before `after`, a result of `mark`.
        """
        if self._module is None:
            yield
            return
        with self._module.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def close(self) -> None:
        """End the groups. Not collective."""
        groups = self._groups
        self._groups = {}
        for group in groups.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)


def join_stages(world: World, stages: Sequence[Stage]) -> PeerGroups:
    """Make the groups of all neighboring ranks whose kind has a library. Collective."""
    return join_peers(
        world,
        [
            pair
            for stage, next_stage in pairwise(stages)
            for pair in product(stage.ranks, next_stage.ranks)
        ],
    )


def join_peers(world: World, pairs: Iterable[tuple[int, int]]) -> PeerGroups:
    """Make the groups of those pairs of ranks whose kind has a library. Collective."""
    groups = {}
    for rank, peer in pairs:
        if not are_joined_by_library([world.infos[rank], world.infos[peer]]):
            continue
        for pair in ((rank, peer), (peer, rank)):
            group = dist.new_group([rank, peer])
            if world.rank in pair:
                groups[pair] = group
    return PeerGroups(world.rank, world.device, groups)
