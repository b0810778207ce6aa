"""Point-to-point messages: nonblocking MPI, beside the queue of collectives.

A receive posted before a collective and matched after it must not block the collective, so messages
have their own communicator and their own thread, which polls the pending ones. What an accelerator
sends is copied out beside its computation, and that thread passes it to MPI once it is there.
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

_CLOSE_SEC = 5.0  # for a message that is still on its way when its group ends
_LEFT_INTERVAL_SEC = 1.0


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
        """Start the thread; after `on_failure` is called, the group cannot be used.

        `has_accelerators` is the same on all ranks: whether one has a device that is not the host.
        """
        self._comm = comm
        self._arrivals = arrivals
        self._on_failure = on_failure
        # Apart, so that what arrives does not wait for the computation of what is sent.
        self._streams = staging.SideStreams()
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
        """Start sending a tensor on any device, which must not change until the work is done."""
        self._check("send", target)
        if self._goes_in_pieces(tensor):
            return self._follow_long(tensor, target, tag, is_receive=False)
        buffer, filled = staging.copy_out(tensor, self._outgoing)

        def start(_: Collection[int]) -> Arriving:
            return self._comm.Isend(as_raw_buffer(buffer), target, tag), buffer

        return self._follow(
            ShortMessage(tensor, buffer, start, target, tag, is_receive=False, filled=filled)
        )

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Message:
        """Start receiving into a tensor on any device; `ANY_SOURCE` accepts any sender."""
        self._check("recv", source)
        if self._goes_in_pieces(tensor):
            return self._follow_long(tensor, source, tag, is_receive=True)
        buffer = to_host(tensor, read=False)
        start = partial(receive_if_arrived, self._comm, buffer, source, tag)
        streams = self._streams.after_caller(tensor)
        return self._follow(
            ShortMessage(tensor, buffer, start, source, tag, is_receive=True, streams=streams)
        )

    def close(self) -> bool:
        """End the thread, and return whether MPI is done with every message; others fail."""
        with self._changed:
            self._closed_at = time.perf_counter()
            self._changed.notify()
        self._thread.join()
        for item in self._pending:
            keep_alive(*item.in_use())
            self._fail_at_end(item)
        return not self._pending

    def _check(self, name: str, peer: int) -> None:
        if self._broken:
            raise CollectiveError(f"{name}: {self._broken}")
        size = self._comm.size
        if peer != ANY_SOURCE and not 0 <= peer < size:
            raise UnsupportedError(
                f"{name}: there is no rank {peer} of {size}; use a rank from 0 to {size - 1}"
            )

    def _goes_in_pieces(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor does, by what both ranks know."""
        return self._has_accelerators and tensor.nbytes > staging.MAX_PINNED_BYTES

    def _follow_long(
        self, tensor: torch.Tensor, peer: int, tag: int, *, is_receive: bool
    ) -> Message:
        buffers = self._buffers
        return self._follow(
            LongMessage(tensor, self._comm, peer, tag, buffers, is_receive=is_receive)
        )

    def _follow(self, item: Message) -> Message:
        with self._changed:
            self._start_after(self._pending, item)
            self._pending.append(item)
            self._changed.notify()
        return item

    def _start(self, pending: Sequence[Message]) -> None:
        """Give MPI what it can be given, in order."""
        before: list[Message] = []
        for item in pending:
            if item.is_waiting_to_start:
                self._start_after(before, item)
                before.append(item)

    def _start_after(self, before: Sequence[Message], item: Message) -> None:
        if not any(other.holds_back(item) for other in before):
            item.start({other.peer for other in before if other.precedes(item)})

    def _poll_or_abort(self) -> None:
        try:
            self._poll()
        except BaseException:  # without this thread, other ranks would wait for its messages
            abort_with_traceback("messages failed:\n")

    def _poll(self) -> None:
        """Poll pending messages and finish them, sleeping in between, until closed."""
        progress_at, moved = time.perf_counter(), 0
        is_closing = False
        while True:
            waiting: list[Message] = []  # else the last messages would keep their tensors
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
                with self._changed:  # no message is started past those that wait
                    self._start(waiting)
                if now >= self._closed_at and not is_closing:
                    is_closing = True
                    for item in waiting:
                        if item.is_receive and not item.moved:
                            item.cancel()
                done = [item for item in waiting if item.is_transferred()]
                if not (done or is_closing):
                    self._fail_overdue(waiting, now)
            except Exception as error:
                if not ulfm.may_be_loss(error):
                    raise
                self._lose(error)
                continue
            if done:
                self._finish(done)
                progress_at = now
                continue
            pieces = sum(item.moved for item in waiting)
            if pieces != moved:
                moved, progress_at = pieces, now
            nap(now - progress_at)

    def _lose(self, error: Exception) -> None:
        """Fail all messages, as a rank is lost; other ranks learn of it, too."""
        ulfm.revoke_all()
        lost = RankLostError(f"a message: a rank is lost ({error})")
        with self._changed:
            items = self._pending
            self._pending = []
        self._broken = f"this process group failed before: {lost}"
        self._on_failure(lost)
        for item in items:
            keep_alive(*item.in_use())
            item.fail(lost)

    def _finish(self, done: list[Message]) -> None:
        with self._changed:
            self._pending = [item for item in self._pending if item not in done]
        for item in done:
            if item.is_canceled:
                self._fail_at_end(item)
            elif item.fault:
                self._break(item, f"{item.describe(self._comm.size)}: {item.fault}")
            else:
                item.finish()

    def _fail_at_end(self, item: Message) -> None:
        awaited = item.describe(self._comm.size)
        item.fail(CollectiveError(f"the group ended while waiting for {awaited}"))

    def _fail_overdue(self, waiting: list[Message], now: float) -> None:
        """Fail a message that has timed out, or whose other rank has left the group."""
        for item in waiting:
            if now - item.awaited_since > self._timeout_sec:
                operation = "recv" if item.is_receive else "send"
                text = f"timed out after {self._timeout_sec:g} s in {operation}: waiting for "
                self._fail(item, text + item.describe(self._comm.size))
                return
        awaited = [item for item in waiting if now - item.awaited_since > _LEFT_INTERVAL_SEC]
        if not awaited or now - self._left_checked_at < _LEFT_INTERVAL_SEC:
            return
        self._left_checked_at = now

        def is_needed() -> bool:
            # Whether this thread has something else to do than to wait for the store.
            is_changed = len(self._pending) > len(waiting) or self._closed_at < float("inf")
            with self._changed:
                self._start(waiting)
            return is_changed or any(item.is_transferred() for item in waiting)

        try:
            left = self._arrivals.ranks_left(until=is_needed)
        except RankLostError:  # a thread that waits in MPI gets the error there
            return
        for item in awaited:
            all_left = len(left) >= self._comm.size - 1
            has_left = all_left if item.peer == ANY_SOURCE else item.peer in left
            if has_left and item.peer_left:  # what it sent before leaving has arrived by now
                text = item.describe(self._comm.size)
                self._fail(item, f"waiting for {text}, which has ended the group")
                return
            item.set_peer_left(has_left)

    def _fail(self, item: Message, text: str) -> None:
        if item.is_receive:
            item.cancel()
            if not item.is_transferred():
                return  # it is arriving at this moment
            if not item.is_canceled:
                self._finish([item])
                return
        else:
            keep_alive(*item.in_use())
        with self._changed:
            self._pending.remove(item)
        self._break(item, text)

    def _break(self, item: Message, text: str) -> None:
        """Fail a message, and so the group."""
        self._broken = f"this process group failed before: {text}"
        error = CollectiveError(text)
        self._on_failure(error)
        item.fail(error)
