"""Point-to-point messages by nonblocking MPI, apart from the queue of collectives.

A receive that is posted before a collective and matched after it must not block the collective. So
messages have their own communicator, and a thread that polls the pending ones. A tensor that an
accelerator sends is copied to the host while the device computes; then the thread gives it to MPI.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives import staging
from kaitian_mpi.distributed.collectives.staging import to_host
from kaitian_mpi.distributed.long_messages import LongMessage, RingPool
from kaitian_mpi.distributed.messages import Arriving, Message, ShortMessage, receive_if_arrived
from kaitian_mpi.errors import CollectiveError, RankLostError, UnsupportedError
from kaitian_mpi.mpi.datatypes import as_raw_buffer
from kaitian_mpi.mpi.host_collectives import ANY_SOURCE
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import keep_alive, nap
from kaitian_mpi.runtime.system import ThreadMaker

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker

_CLOSE_SEC = 5.0  # how long the end of the group waits for messages that are on their way
_LEFT_INTERVAL_SEC = 1.0  # between two checks of which ranks have left the group


class Mailbox:
    """The point-to-point messages of one rank."""

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
        self._arrivals = arrivals
        self._on_failure = on_failure
        # Two sets, so that a received tensor does not wait until a sent one is computed.
        self._incoming = staging.SideStreams()
        self._outgoing = staging.SideStreams()
        self._has_accelerators = has_accelerators
        self._buffers = RingPool()
        self.set_timeout(timeout)
        self._broken = ""
        self._pending: list[Message] = []
        self._changed = threading.Condition()
        self._thread = make_thread(self._poll_or_abort, name)
        self._closed_at = float("inf")
        self._left_checked_at = float("-inf")
        self._thread.start()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of messages, including pending ones. Not collective."""
        self._timeout_sec = timeout.total_seconds()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Message:
        """Start sending a tensor on any device, which must not change until the work is done.

        Raises:
            CollectiveError: the group has failed before.
            UnsupportedError: there is no such rank.
        """
        self._check_usable("send", target)
        if self._goes_in_pieces(tensor):
            return self._follow_long(tensor, target, tag, is_receive=False)
        buffer, filled = staging.copy_out(tensor, self._outgoing)

        def start(_: Collection[int]) -> Arriving:
            return self._comm.Isend(as_raw_buffer(buffer), target, tag), buffer

        return self._follow(
            ShortMessage(tensor, buffer, start, target, tag, is_receive=False, filled=filled)
        )

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Message:
        """Start receiving into a tensor on any device; `ANY_SOURCE` accepts any sender.

        Raises:
            CollectiveError: the group has failed before.
            UnsupportedError: there is no such rank.
        """
        self._check_usable("recv", source)
        if self._goes_in_pieces(tensor):
            return self._follow_long(tensor, source, tag, is_receive=True)
        buffer = to_host(tensor, read=False)
        start = partial(receive_if_arrived, self._comm, buffer, source, tag)
        streams = self._incoming.after_caller(tensor)
        return self._follow(
            ShortMessage(tensor, buffer, start, source, tag, is_receive=True, streams=streams)
        )

    def close(self) -> bool:
        """End the thread, and fail pending messages; return whether there were none."""
        with self._changed:
            self._closed_at = time.perf_counter()
            self._changed.notify()
        self._thread.join()
        for message in self._pending:
            keep_alive(*message.in_use())
            self._fail_at_end(message)
        return not self._pending

    def _check_usable(self, operation: str, peer: int) -> None:
        if self._broken:
            raise CollectiveError(f"{operation}: {self._broken}")
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
        return self._follow(message)

    def _follow(self, message: Message) -> Message:
        """Have the thread follow a message to its end."""
        with self._changed:
            self._start_after(self._pending, message)
            self._pending.append(message)
            self._changed.notify()
        return message

    def _start(self, pending: Sequence[Message]) -> None:
        """Give MPI those messages that may start now, in order."""
        before: list[Message] = []
        for message in pending:
            if message.is_waiting_to_start:
                self._start_after(before, message)
                before.append(message)

    def _start_after(self, before: Sequence[Message], message: Message) -> None:
        """Start a message, unless one of those `before` it must start first."""
        if not any(other.holds_back(message) for other in before):
            message.start({other.peer for other in before if other.precedes(message)})

    def _poll_or_abort(self) -> None:
        try:
            self._poll()
        except BaseException:  # without this thread, other ranks would wait for its messages
            abort_with_traceback("messages failed:\n")

    def _poll(self) -> None:
        """Poll pending messages and finish them, sleeping in between, until closed."""
        progress_at = time.perf_counter()
        pieces_before = 0
        is_closing = False
        while True:
            # Emptied before the thread sleeps, as they would keep the last messages' tensors.
            waiting: list[Message] = []
            done: list[Message] = []
            with self._changed:
                while not self._pending and self._closed_at == float("inf"):
                    self._changed.wait()
                    progress_at = time.perf_counter()
                waiting = list(self._pending)
            now = time.perf_counter()
            if not waiting or now - self._closed_at > _CLOSE_SEC:
                return
            try:
                with self._changed:  # `_follow` starts no message before those that wait
                    self._start(waiting)
                if now >= self._closed_at and not is_closing:
                    is_closing = True
                    for message in waiting:
                        if message.is_receive and not message.moved:
                            message.cancel()
                done = [message for message in waiting if message.is_transferred()]
                if not (done or is_closing):
                    self._fail_overdue(waiting, now)
            except Exception as error:
                if not ulfm.may_be_loss(error):
                    raise
                self._fail_all(error)
                continue
            if done:
                self._finish(done)
                progress_at = now
                continue
            pieces = sum(message.moved for message in waiting)
            if pieces != pieces_before:
                pieces_before = pieces
                progress_at = now
            nap(now - progress_at)

    def _fail_all(self, error: Exception) -> None:
        """Fail all messages because a rank was lost; the other ranks learn of it, too."""
        ulfm.revoke_all()
        lost = RankLostError(f"a message: a rank is lost ({error})")
        with self._changed:
            messages = self._pending
            self._pending = []
        self._broken = f"this process group failed before: {lost}"
        self._on_failure(lost)
        for message in messages:
            keep_alive(*message.in_use())
            message.fail(lost)

    def _finish(self, done: list[Message]) -> None:
        with self._changed:
            self._pending = [message for message in self._pending if message not in done]
        for message in done:
            if message.is_canceled:
                self._fail_at_end(message)
            elif message.fault:
                self._fail_group(message, f"{message.describe(self._comm.size)}: {message.fault}")
            else:
                message.finish()

    def _fail_at_end(self, message: Message) -> None:
        awaited = message.describe(self._comm.size)
        message.fail(CollectiveError(f"the group ended while waiting for {awaited}"))

    def _fail_overdue(self, waiting: list[Message], now: float) -> None:
        """Fail a message that has timed out, or whose other rank has left the group.

        At most one, as it fails the group.
        """
        for message in waiting:
            if now - message.awaited_since > self._timeout_sec:
                operation = "recv" if message.is_receive else "send"
                awaited = message.describe(self._comm.size)
                text = (
                    f"timed out after {self._timeout_sec:g} s in {operation}: waiting for {awaited}"
                )
                self._fail(message, text)
                return
        overdue = [
            message for message in waiting if now - message.awaited_since > _LEFT_INTERVAL_SEC
        ]
        if overdue and now - self._left_checked_at >= _LEFT_INTERVAL_SEC:
            self._left_checked_at = now
            self._fail_abandoned(waiting, overdue)

    def _fail_abandoned(self, waiting: list[Message], overdue: list[Message]) -> None:
        """Fail the first of the overdue messages whose other rank has left the group."""

        def is_needed() -> bool:
            # Whether this thread has something else to do than to wait for the store.
            is_changed = len(self._pending) > len(waiting) or self._closed_at < float("inf")
            with self._changed:
                self._start(waiting)
            return is_changed or any(message.is_transferred() for message in waiting)

        try:
            left = self._arrivals.ranks_left(until=is_needed)
        except RankLostError:  # a thread that waits in MPI gets the error there
            return
        have_all_left = len(left) >= self._comm.size - 1
        for message in overdue:
            has_left = have_all_left if message.peer == ANY_SOURCE else message.peer in left
            # Only at the second check: what the rank sent before leaving has arrived by then.
            if has_left and message.peer_left:
                awaited = message.describe(self._comm.size)
                self._fail(message, f"waiting for {awaited}, which has ended the group")
                return
            message.set_peer_left(has_left)

    def _fail(self, message: Message, text: str) -> None:
        """Fail a message and the group, unless the message arrives at this moment."""
        if message.is_receive:
            message.cancel()
            if not message.is_transferred():
                return  # it is arriving
            if not message.is_canceled:
                self._finish([message])
                return
        else:
            keep_alive(*message.in_use())
        with self._changed:
            self._pending.remove(message)
        self._fail_group(message, text)

    def _fail_group(self, message: Message, text: str) -> None:
        """Fail a message, and with it the group."""
        self._broken = f"this process group failed before: {text}"
        error = CollectiveError(text)
        self._on_failure(error)
        message.fail(error)
