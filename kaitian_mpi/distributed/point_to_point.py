"""Point-to-point messages by nonblocking MPI, apart from the queue of collectives.

A receive that is posted before a collective and matched after it must not block the collective. So
messages have their own communicator, and a thread that polls the pending ones. A tensor that an
accelerator sends is copied to the host while the device computes; then the thread gives it to MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives import staging
from kaitian_mpi.distributed.collectives.staging import to_host
from kaitian_mpi.distributed.long_messages import LongMessage, RingPool
from kaitian_mpi.distributed.message_thread import MessageThread
from kaitian_mpi.distributed.messages import Arriving, Message, ShortMessage, receive_if_arrived
from kaitian_mpi.errors import CollectiveError, UnsupportedError
from kaitian_mpi.mpi.datatypes import as_raw_buffer
from kaitian_mpi.mpi.host_collectives import ANY_SOURCE
from kaitian_mpi.runtime.system import ThreadMaker

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker


class Mailbox:
    """Sends and receives the point-to-point messages of one rank."""

    def __init__(
        self,
        comm: MPI.Comm,
        name: str,
        arrivals: ArrivalTracker,
        timeout: timedelta,
        on_failure: Callable[[CollectiveError], None],
        make_thread: ThreadMaker,
        has_accelerators: bool,
    ) -> None:
        """Start the thread. Not collective.

        `on_failure` is called with the error after which the group cannot be used.
        `has_accelerators` says whether some rank's device is not its host; the same on all ranks.
        """
        self._comm = comm
        # Two sets, so that a received tensor does not wait until a sent one is computed.
        self._incoming = staging.SideStreams()
        self._outgoing = staging.SideStreams()
        self._has_accelerators = has_accelerators
        self._buffers = RingPool()
        self._thread = MessageThread(comm.size, name, arrivals, timeout, on_failure, make_thread)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of messages, including pending ones. Not collective."""
        self._thread.set_timeout(timeout)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Message:
        """Start sending a tensor on any device, which must not change until the work is done.

        Raises:
            UnsupportedError: there is no such rank.
        """
        self._check_rank("send", target)
        if self._goes_in_pieces(tensor):
            return self._follow_long(tensor, target, tag, is_receive=False)
        buffer, filled = staging.copy_out(tensor, self._outgoing)

        def start(_: Collection[int]) -> Arriving:
            return self._comm.Isend(as_raw_buffer(buffer), target, tag), buffer

        return self._thread.follow(
            ShortMessage(tensor, buffer, start, target, tag, is_receive=False, filled=filled)
        )

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Message:
        """Start receiving into a tensor on any device; `ANY_SOURCE` accepts any sender.

        Raises:
            UnsupportedError: there is no such rank.
        """
        self._check_rank("recv", source)
        if self._goes_in_pieces(tensor):
            return self._follow_long(tensor, source, tag, is_receive=True)
        buffer = to_host(tensor, read=False)
        start = partial(receive_if_arrived, self._comm, buffer, source, tag)
        streams = self._incoming.after_caller(tensor)
        return self._thread.follow(
            ShortMessage(tensor, buffer, start, source, tag, is_receive=True, streams=streams)
        )

    def close(self) -> bool:
        """End the thread, and fail pending messages; return whether there were none."""
        return self._thread.close()

    def _check_rank(self, operation: str, peer: int) -> None:
        size = self._comm.size
        if peer != ANY_SOURCE and not 0 <= peer < size:
            raise UnsupportedError(
                f"{operation}: there is no rank {peer} of {size}; use a rank from 0 to {size - 1}"
            )

    def _goes_in_pieces(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is sent in pieces; sender and receiver decide alike."""
        return self._has_accelerators and tensor.nbytes > staging.MAX_PINNED_BYTES

    def _follow_long(
        self, tensor: torch.Tensor, peer: int, tag: int, *, is_receive: bool
    ) -> Message:
        message = LongMessage(tensor, self._comm, peer, tag, self._buffers, is_receive=is_receive)
        return self._thread.follow(message)
