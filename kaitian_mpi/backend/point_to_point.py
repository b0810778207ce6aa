"""Messages between two ranks: nonblocking MPI, beside the queue of collectives.

A receive posted before a collective and matched after it must not stop the collective, so messages
have a communicator and a thread of their own. The thread only looks after what is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kaitian_mpi.collectives.compiler import not_compiled
from kaitian_mpi.collectives.staging import SideStreams, Streams, from_host, to_host
from kaitian_mpi.collectives.work import Queued
from kaitian_mpi.errors import CollectiveError, RankLostError, UnsupportedError, format_ranks
from kaitian_mpi.mpi.messages import ANY_SOURCE, Transfer, start_receive, start_send
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import keep_alive, nap

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.collectives.arrivals import ArrivalTracker

ENDED = "this process group has been destroyed"
"""Why nothing can follow in a group."""

_PATIENCE_SEC = 5.0  # for a message that is still on its way when its group ends
_LOOKING_SEC = 1.0


@not_compiled
class Message(Queued):
    """A message under way; done when its buffer may be used again.

    Its time begins when somebody waits for it, as with gloo: a receive may be posted long before.
    """

    source = -1
    """The sender's rank, of a message that has been received."""
    awaited_since = float("inf")
    """By `time.perf_counter`."""

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done.

        Raises:
            CollectiveError: it is not within `timeout`, after which it goes on; or not within the
                group's time-out, or never will be.
        """
        self._begin_time()
        return super().wait(timeout)

    def synchronize(self) -> None:
        """Block until it is done."""
        self._begin_time()
        super().synchronize()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors."""
        self._begin_time()
        return super().get_future()

    def _begin_time(self) -> None:
        self.awaited_since = min(self.awaited_since, time.perf_counter())


@dataclass(eq=False)
class _UnderWay:
    transfer: Transfer
    work: Message
    deliver: Callable[[], Any]
    peer: int
    streams: Streams
    """Where it is delivered: after what the caller had given to its stream before."""
    peer_left: bool = False

    def finish(self) -> None:
        """Deliver what has come, and mark the work done."""
        self.work.source = self.transfer.source
        with self.streams:
            self.deliver()
            self.work.finish()

    def awaited(self, size: int) -> str:
        """Return what it waits for, in words."""
        who = "any rank" if self.peer == ANY_SOURCE else format_ranks([self.peer], size)
        return f"a message from {who}" if self.transfer.is_receive else f"{who} to receive"


class Mailbox:
    """The messages of one rank."""

    def __init__(
        self,
        comm: MPI.Comm,
        name: str,
        arrivals: ArrivalTracker,
        timeout: timedelta,
        on_failure: Callable[[CollectiveError], None],
    ) -> None:
        """Prepare.

        Args:
            comm: the ranks, for messages alone.
            name: the thread's.
            arrivals: knows which ranks have ended the group.
            timeout: how long a message is waited for.
            on_failure: told when one has failed, so that nothing more can follow in the group.
        """
        self._comm = comm
        self._name = name
        self._streams = SideStreams()
        self._arrivals = arrivals
        self._timeout_sec = timeout.total_seconds()
        self._on_failure = on_failure
        self._refusal = ""
        self._under_way: list[_UnderWay] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed_at = float("inf")
        self._looked_at = float("-inf")

    def set_timeout(self, timeout: timedelta) -> None:
        """Give messages another time-out, also those under way. Not collective."""
        self._timeout_sec = timeout.total_seconds()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Message:
        """Start sending a tensor on any device; it may be changed once the work is done."""
        self._check("send", target)
        buffer = to_host(tensor)
        transfer = start_send(self._comm, buffer, target, tag)
        work = Message([tensor])
        return self._follow(_UnderWay(transfer, work, _nothing, target, nullcontext()))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Message:
        """Start receiving into a tensor on any device; `ANY_SOURCE` takes any sender."""
        self._check("recv", source)
        buffer = to_host(tensor, read=False)
        transfer = start_receive(self._comm, buffer, source, tag)
        deliver = partial(from_host, buffer, tensor, non_blocking=True)
        streams = self._streams.after_caller(tensor)
        return self._follow(_UnderWay(transfer, Message([tensor]), deliver, source, streams))

    def close(self) -> bool:
        """End the thread. What nobody will receive or send any more is given up.

        Returns:
            Whether MPI is done with every message.
        """
        self._refusal = ENDED
        with self._changed:
            self._closed_at = time.perf_counter()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        left_over, self._under_way = self._under_way, []
        for item in left_over:
            keep_alive(item)
            self._fail_at_end(item)
        return not left_over

    def _check(self, name: str, peer: int) -> None:
        if self._refusal:
            raise CollectiveError(f"{name}: {self._refusal}")
        size = self._comm.size
        if peer != ANY_SOURCE and not 0 <= peer < size:
            raise UnsupportedError(
                f"{name}: found rank {peer} of {size}, needed a rank of 0 to {size - 1}"
            )

    def _follow(self, item: _UnderWay) -> Message:
        with self._changed:
            self._under_way.append(item)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_guarded, name=self._name, daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return item.work

    def _look_guarded(self) -> None:
        try:
            self._look()
        except BaseException:  # without this thread nobody's messages would come any more
            abort_with_traceback("messages failed:\n")

    def _look(self) -> None:
        """Help messages along and finish them, asleep in between, until closed."""
        moved_at = time.perf_counter()
        is_closing = False
        while True:
            with self._changed:
                while not self._under_way and self._closed_at == float("inf"):
                    self._changed.wait()
                    moved_at = time.perf_counter()
                waiting = list(self._under_way)
            now = time.perf_counter()
            if not waiting or now - self._closed_at > _PATIENCE_SEC:
                return
            if now >= self._closed_at and not is_closing:
                is_closing = True
                for item in waiting:
                    if item.transfer.is_receive:
                        item.transfer.cancel()
            if self._finish_done(waiting):
                moved_at = now
                continue
            if not is_closing:
                self._fail_overdue(waiting, now)
            nap(now - moved_at)

    def _finish_done(self, waiting: list[_UnderWay]) -> bool:
        done = [item for item in waiting if item.transfer.done()]
        if done:
            self._forget(done)
        for item in done:
            if item.transfer.is_receive and item.transfer.is_cancelled:
                self._fail_at_end(item)
                continue
            item.finish()
        return bool(done)

    def _forget(self, items: list[_UnderWay]) -> None:
        with self._changed:
            self._under_way = [item for item in self._under_way if item not in items]

    def _fail_at_end(self, item: _UnderWay) -> None:
        awaited = item.awaited(self._comm.size)
        item.work.fail(CollectiveError(f"the group ended while it waited for {awaited}"))

    def _fail_overdue(self, waiting: list[_UnderWay], now: float) -> None:
        """Fail what has been waited for too long, or what a rank that has left should do."""
        for item in waiting:
            if now - item.work.awaited_since > self._timeout_sec:
                operation = "recv" if item.transfer.is_receive else "send"
                self._fail(
                    item,
                    f"timed out after {self._timeout_sec:g} s in {operation}: "
                    f"waiting for {item.awaited(self._comm.size)}",
                )
                return
        awaited = [item for item in waiting if now - item.work.awaited_since > _LOOKING_SEC]
        if not awaited or now - self._looked_at < _LOOKING_SEC:
            return
        self._looked_at = now
        left = self._ranks_left()
        for item in awaited:
            everybody = len(left) >= self._comm.size - 1
            gone = everybody if item.peer == ANY_SOURCE else item.peer in left
            if gone and item.peer_left:  # what it sent before has come by now
                awaited_text = item.awaited(self._comm.size)
                self._fail(item, f"waiting for {awaited_text}, which has ended the group")
                return
            item.peer_left = gone

    def _ranks_left(self) -> list[int]:
        try:
            return self._arrivals.ranks_left()
        except RankLostError:  # whoever waits in MPI hears of it there
            return []

    def _fail(self, item: _UnderWay, text: str) -> None:
        if item.transfer.is_receive:
            item.transfer.cancel()
            if not item.transfer.done():
                return  # it is coming at this moment
            if not item.transfer.is_cancelled:
                self._forget([item])
                item.finish()
                return
        else:
            keep_alive(item)
        self._forget([item])
        self._refusal = f"this process group failed before: {text}"
        error = CollectiveError(text)
        self._on_failure(error)
        item.work.fail(error)


def _nothing() -> None:
    pass
