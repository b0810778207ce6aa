"""Point-to-point messages: nonblocking MPI, beside the queue of collectives.

A receive posted before a collective and matched after it must not block the collective, so messages
have their own communicator and their own thread, which polls the pending ones. What an accelerator
sends is copied out beside its computation, and that thread passes it to MPI once it is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives import staging
from kaitian_mpi.distributed.collectives.staging import StreamEnd, from_host, to_host
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.collectives.work import Queued
from kaitian_mpi.errors import CollectiveError, RankLostError, UnsupportedError, format_ranks
from kaitian_mpi.mpi.datatypes import as_raw_buffer
from kaitian_mpi.mpi.host_collectives import ANY_SOURCE
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import keep_alive, nap
from kaitian_mpi.runtime.system import CommunicationThread, ThreadMaker

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker

_CLOSE_SEC = 5.0  # for a message that is still on its way when its group ends
_LEFT_INTERVAL_SEC = 1.0


@not_compiled
class Message(Queued):
    """The work of a pending message; done when its buffer may be used again.

    Its timeout starts with the first wait, as with gloo: a receive may be posted long before.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        start: Callable[[], MPI.Request],
        peer: int,
        *,
        is_receive: bool,
        streams: staging.Streams = staging.NO_STREAMS,
        filled: StreamEnd | None = None,
    ) -> None:
        """Follow the request that `start` returns, whose buffer is in host memory.

        What it receives is for `tensor`. What it sends is in the buffer once `filled` is reached.
        """
        from mpi4py import MPI

        # A message is sent from a copy, so that its end is no matter of the device's streams.
        super().__init__([tensor] if is_receive else [])
        self.peer, self.is_receive = peer, is_receive
        self._tensor, self._buffer, self._streams = tensor, buffer, streams
        self._start, self._filled = start, filled
        self._request: MPI.Request | None = None
        self._status = MPI.Status()
        self._is_transferred = False
        self._source = -1
        self.awaited_since = float("inf")
        """When the first wait for it started, by `time.perf_counter`."""
        self.peer_left = False

    def _source_rank(self) -> int:
        """Return the sender's rank; -1 until the message has been received."""
        return self._source

    source_rank = _source_rank

    @property
    def is_waiting_to_start(self) -> bool:
        """Whether MPI has not been given the message yet."""
        return self._request is None

    def start(self) -> bool:
        """Give MPI the message if the buffer is filled; return whether MPI has it."""
        if self._request is None and (self._filled is None or self._filled.is_reached()):
            self._request = self._start()
        return self._request is not None

    def is_transferred(self) -> bool:
        """Return whether MPI is done with the buffer; lets MPI make progress."""
        # A second test would clear the status.
        self._is_transferred = self._is_transferred or (
            self._request is not None and self._request.Test(self._status)
        )
        return self._is_transferred

    @property
    def is_canceled(self) -> bool:
        """Whether a receive that MPI is done with was canceled, and so got no message."""
        return self._status.Is_cancelled()

    def cancel(self) -> None:
        """Cancel a receive that no message has matched."""
        assert self._request is not None
        self._request.Cancel()

    def finish(self) -> None:
        self._source = self._status.Get_source()
        with self._streams:
            if self.is_receive:
                from_host(self._buffer, self._tensor, non_blocking=True)
            super().finish()

    def describe(self, size: int) -> str:
        who = "any rank" if self.peer == ANY_SOURCE else format_ranks([self.peer], size)
        return f"a message from {who}" if self.is_receive else f"{who} to receive"

    def wait(self, timeout: timedelta | None = None) -> bool:  # also called by `synchronize`
        self._start_timeout()
        return super().wait(timeout)

    def get_future(self) -> torch.futures.Future:
        self._start_timeout()
        return super().get_future()

    def _start_timeout(self) -> None:
        self.awaited_since = min(self.awaited_since, time.perf_counter())


class Mailbox:
    """The point-to-point messages of one rank."""

    def __init__(
        self,
        comm: MPI.Comm,
        name: str,
        arrivals: ArrivalTracker,
        timeout: timedelta,
        on_failure: Callable[[CollectiveError], None],
        make_thread: ThreadMaker = CommunicationThread,
    ) -> None:
        """Start the thread; after `on_failure` is called, the group cannot be used."""
        self._comm, self._arrivals, self._on_failure = comm, arrivals, on_failure
        # Apart, so that what arrives does not wait for the computation of what is sent.
        self._streams, self._outgoing = staging.SideStreams(), staging.SideStreams()
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
        buffer, filled = staging.copy_out(tensor, self._outgoing)
        start = partial(self._comm.Isend, as_raw_buffer(buffer), target, tag)
        return self._follow(Message(tensor, buffer, start, target, is_receive=False, filled=filled))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Message:
        """Start receiving into a tensor on any device; `ANY_SOURCE` accepts any sender."""
        self._check("recv", source)
        buffer = to_host(tensor, read=False)
        start = partial(self._comm.Irecv, as_raw_buffer(buffer), source, tag)
        streams = self._streams.after_caller(tensor)
        return self._follow(
            Message(tensor, buffer, start, source, is_receive=True, streams=streams)
        )

    def close(self) -> bool:
        """End the thread, and return whether MPI is done with every message; others fail."""
        with self._changed:
            self._closed_at = time.perf_counter()
            self._changed.notify()
        self._thread.join()
        for item in self._pending:
            keep_alive(item)
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

    def _follow(self, item: Message) -> Message:
        with self._changed:
            if item.is_receive or not any(other.is_waiting_to_start for other in self._pending):
                item.start()
            self._pending.append(item)
            self._changed.notify()
        return item

    def _start_sends(self, waiting: Sequence[Message]) -> None:
        """Give MPI what is copied out, in order, in which it matches what two ranks exchange."""
        for item in waiting:
            if item.is_waiting_to_start and not item.start():
                return

    def _poll_or_abort(self) -> None:
        try:
            self._poll()
        except BaseException:  # without this thread, other ranks would wait for its messages
            abort_with_traceback("messages failed:\n")

    def _poll(self) -> None:
        """Poll pending messages and finish them, sleeping in between, until closed."""
        progress_at = time.perf_counter()
        is_closing = False
        while True:
            with self._changed:
                while not self._pending and self._closed_at == float("inf"):
                    self._changed.wait()
                    progress_at = time.perf_counter()
                waiting = list(self._pending)
            now = time.perf_counter()
            if not waiting or now - self._closed_at > _CLOSE_SEC:
                return
            if now >= self._closed_at and not is_closing:
                is_closing = True
                for item in waiting:
                    if item.is_receive:
                        item.cancel()
            try:
                with self._changed:  # no message is started past those that wait
                    self._start_sends(waiting)
                done = [item for item in waiting if item.is_transferred()]
            except Exception as error:
                if not ulfm.may_be_loss(error):
                    raise
                self._lose(error)
                continue
            if done:
                self._finish(done)
                progress_at = now
                continue
            if not is_closing:
                self._fail_overdue(waiting, now)
            nap(now - progress_at)

    def _lose(self, error: Exception) -> None:
        """Fail all messages, as a rank is lost; other ranks learn of it, too."""
        ulfm.revoke_all()
        lost = RankLostError(f"a message: a rank is lost ({error})")
        with self._changed:
            items, self._pending = self._pending, []
        self._broken = f"this process group failed before: {lost}"
        self._on_failure(lost)
        for item in items:
            keep_alive(item)
            item.fail(lost)

    def _finish(self, done: list[Message]) -> None:
        with self._changed:
            self._pending = [item for item in self._pending if item not in done]
        for item in done:
            if item.is_receive and item.is_canceled:
                self._fail_at_end(item)
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
            item.peer_left = has_left

    def _fail(self, item: Message, text: str) -> None:
        if item.is_receive:
            item.cancel()
            if not item.is_transferred():
                return  # it is arriving at this moment
            if not item.is_canceled:
                self._finish([item])
                return
        else:
            keep_alive(item)
        with self._changed:
            self._pending.remove(item)
        self._broken = f"this process group failed before: {text}"
        error = CollectiveError(text)
        self._on_failure(error)
        item.fail(error)
