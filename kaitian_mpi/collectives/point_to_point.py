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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kaitian_mpi.collectives.staging import SideStreams, Streams, from_host, to_host
from kaitian_mpi.collectives.worker import Queued
from kaitian_mpi.mpi.guard import end_with_traceback
from kaitian_mpi.mpi.messages import Transfer, start_receive, start_send
from kaitian_mpi.mpi.waiting import nap

if TYPE_CHECKING:
    from mpi4py import MPI

_PATIENCE_SEC = 5.0  # for a message that is still on its way when its group ends


class Message(Queued):
    """A message under way; done when its buffer may be used again."""

    source = -1
    """The sender's rank, of a message that has been received."""

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


@dataclass(eq=False)
class _UnderWay:
    transfer: Transfer
    work: Message
    deliver: Callable[[], Any]
    streams: Streams
    """Where it is delivered: after what the caller had given to its stream before."""


class Mailbox:
    """The messages of one rank."""

    def __init__(self, comm: MPI.Comm, name: str) -> None:
        """Prepare; `comm` is for messages alone."""
        self._comm = comm
        self._name = name
        self._streams = SideStreams()
        self._under_way: list[_UnderWay] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed_at = float("inf")

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Message:
        """Start sending a tensor on any device; it may be changed once the work is done."""
        buffer = to_host(tensor)
        transfer = start_send(self._comm, buffer, target, tag)
        return self._follow(_UnderWay(transfer, Message([tensor]), _nothing, nullcontext()))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Message:
        """Start receiving into a tensor on any device; `ANY_SOURCE` takes any sender."""
        buffer = to_host(tensor, read=False)
        transfer = start_receive(self._comm, buffer, source, tag)
        deliver = partial(from_host, buffer, tensor, non_blocking=True)
        streams = self._streams.after_caller(tensor)
        return self._follow(_UnderWay(transfer, Message([tensor]), deliver, streams))

    def close(self) -> None:
        """End the thread. What nobody will receive or send any more is given up."""
        with self._changed:
            self._closed_at = time.perf_counter()
            for item in self._under_way:
                if item.transfer.is_receive:
                    item.transfer.cancel()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

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
            end_with_traceback("messages failed:\n")

    def _look(self) -> None:
        """Help messages along and finish them, asleep in between, until closed."""
        moved_at = time.perf_counter()
        while True:
            with self._changed:
                while not self._under_way and self._closed_at == float("inf"):
                    self._changed.wait()
                    moved_at = time.perf_counter()
                waiting = list(self._under_way)
            now = time.perf_counter()
            if not waiting or now - self._closed_at > _PATIENCE_SEC:
                return
            if self._finish_done(waiting):
                moved_at = now
                continue
            nap(now - moved_at)

    def _finish_done(self, waiting: list[_UnderWay]) -> bool:
        done = [item for item in waiting if item.transfer.done()]
        if done:
            with self._changed:
                self._under_way = [item for item in self._under_way if item not in done]
        for item in done:
            item.work.source = item.transfer.source
            with item.streams:
                item.deliver()
                item.work.finish()
        return bool(done)


def _nothing() -> None:
    pass
