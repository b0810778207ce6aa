"""The thread that executes a process group's collectives, first in, first out."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed.collectives.collective import Call
from kaitian_mpi.distributed.collectives.staging import NO_STREAMS, SideStreams, Streams, writing
from kaitian_mpi.distributed.collectives.work import Finished, Queued
from kaitian_mpi.errors import CollectiveError, RankLostError, UnsupportedError
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback, write_labeled
from kaitian_mpi.runtime.system import CommunicationThread, ThreadMaker

_KEPT_WORKS = 16

# Errors in the call's own arguments, raised before anything is sent.
_ARGUMENT_ERRORS = (UnsupportedError, TypeError, ValueError, NotImplementedError)


class _Task(NamedTuple):  # faster to create than a frozen dataclass
    run: Call
    streams: Streams
    is_callback: bool = False


class Worker:
    """Runs tasks one after the other; in the caller's thread if possible, else in its own.

    After a failure the ranks no longer agree on the next collective, so all later ones fail as
    well. An error in the worker's thread is raised where the collective is waited for.
    """

    def __init__(
        self,
        name: str,
        streams: SideStreams,
        begins: Callable[[str], object] = lambda _: None,
        make_thread: ThreadMaker = CommunicationThread,
    ) -> None:
        """Start no thread yet; on an accelerator it works on `streams`.

        Args:
            name: of the thread.
            streams: on which it works.
            begins: called with the name of each collective, in the thread that executes it.
            make_thread: of the process's device.
        """
        self._begins = begins
        self.broken: CollectiveError | None = None
        """Why no more tasks can be executed; None if they can."""
        self.records_losses = False
        """Whether the caller checks `broken` before using a future's value."""
        self._name = name
        self._streams = streams
        self._make_thread = make_thread
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._count_lock = threading.Lock()
        self._waiting = 0
        # DDP's join keeps only the C++ half of the work of its one-element all_reduce, which still
        # needs the Python half.
        self._kept: deque[Queued] = deque(maxlen=_KEPT_WORKS)
        self._failed: Queued | None = None
        self._thread: threading.Thread | None = None
        self._in_callback = self._is_closing = False  # used by the worker's thread only

    def run(
        self,
        name: str,
        call: Call,
        result: list[torch.Tensor],
        in_background: bool,
        tensors: Any = None,
    ) -> Work:
        """Execute a collective after all those started before it.

        In a callback of a future it is executed at once, in the callback's thread: that is the
        callback's place in the order (see `OrderedFuture`), the same on every rank. If not
        `in_background`, the caller will wait for it anyway: it then runs in the caller's own thread
        if nothing is queued, which saves two thread switches. `tensors` are all that it uses, in
        lists of any depth; None for `result`, those it writes.
        """
        # Never true in the worker's own thread, which already holds the lock.
        if not in_background and self._waiting == 0 and self._turn.acquire(blocking=False):
            try:
                self._attempt(name, call, result)
            finally:
                self._turn.release()
            return Finished(result)
        if self._is_in_callback():
            self._attempt(name, call, result)
            return Finished(result)
        return self._enqueue(name, call, result, tensors)

    def drain(self, name: str) -> None:
        """Wait until everything queued is done; in a callback of a future, do not wait."""
        is_idle = self._waiting == 0 and not self._turn.locked()
        if not is_idle and not self._is_in_callback():
            self._enqueue(name, lambda: None, [], None).wait()
        self.check(name)

    def check(self, name: str) -> None:
        """Raise the error of an operation of that name if no more can be executed."""
        if self.broken is not None:
            raise type(self.broken)(f"{name}: this process group failed before: {self.broken}")

    def fail(self, error: CollectiveError) -> None:
        """Make all later collectives fail: something else in the group has failed."""
        self.broken = self.broken or error

    def record_losses(self) -> None:
        """Complete works without an error if a rank is lost: the caller checks `broken`."""
        self.records_losses = True

    def call_back(self, callback: Callable[[], None], tensors: list[torch.Tensor]) -> None:
        def call() -> None:
            callback()
            self._count(-1)

        self._put(_Task(call, self._streams.after_caller(tensors), is_callback=True))

    def run_until(self, done: Callable[[], bool]) -> None:
        while self._is_own_thread() and not done():
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                raise RuntimeError(
                    "deadlock: a future's callback waits for itself or for a later collective"
                ) from None
            self._run_task(task)

    def close(self) -> None:
        """Finish what is queued, end the thread, and report an error that no caller waited for."""
        if self._thread is not None:
            self._put(_Task(self._begin_closing, NO_STREAMS))
            self._thread.join()
            self._thread = None
            self._is_closing = False
        failed = self._failed
        self._failed = None
        if failed is not None and not failed.is_error_seen:
            write_labeled(f"a collective failed, and no caller waited for it: {failed.exception()}")

    def _is_own_thread(self) -> bool:
        thread = self._thread
        return thread is not None and thread.ident == threading.get_ident()

    def _is_in_callback(self) -> bool:
        return self._in_callback and self._is_own_thread()

    def _enqueue(self, name: str, call: Call, result: list[torch.Tensor], tensors: Any) -> Queued:
        work = Queued(name, result, self)
        if sum(tensor.numel() for tensor in result) <= 1:
            self._kept.append(work)

        def execute() -> None:
            try:
                self._attempt(name, call, result)
            except Exception as error:
                self._count(-1)
                self._failed = self._failed or work
                work.fail(error, is_recorded=self.records_losses)
            else:
                self._count(-1)
                work.finish()

        streams = self._streams.after_caller(result if tensors is None else tensors)
        self._put(_Task(execute, streams))
        return work

    def _put(self, task: _Task) -> None:
        with self._count_lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = self._make_thread(self._loop, self._name)
                self._thread.start()
        self._tasks.put(task)

    def _begin_closing(self) -> None:
        self._is_closing = True
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._count_lock:
            self._waiting += change

    def _loop(self) -> None:
        try:
            while not self._is_closing or not self._tasks.empty():
                task = self._tasks.get()
                with self._turn:
                    self._run_task(task)
        except BaseException:  # without this thread, all ranks would wait for its collectives
            abort_with_traceback("collectives failed:\n")

    def _run_task(self, task: _Task) -> None:
        outer = self._in_callback
        self._in_callback = task.is_callback
        try:
            with task.streams:
                task.run()
        finally:
            self._in_callback = outer

    def _attempt(self, name: str, call: Call, result: list[torch.Tensor]) -> None:
        self.check(name)
        try:
            self._begins(name)
            with writing(result):
                call()
            if self.broken is not None:  # meanwhile: what a library has left is no result
                raise self.broken
        except CollectiveError as error:
            self.broken = error.with_operation(name)
            raise self.broken from None
        except Exception as error:
            if ulfm.may_be_loss(error):
                ulfm.revoke_all()
                self.broken = RankLostError(f"{name}: a rank is lost ({error})")
                raise self.broken from None
            if not isinstance(error, _ARGUMENT_ERRORS):
                self.broken = CollectiveError(f"{name}: {type(error).__name__}: {error}")
            raise
