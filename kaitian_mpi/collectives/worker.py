"""The thread that carries out a process group's collectives, first in, first out."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives.staging import SideStreams, Streams, ordered_devices, settle
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.mpi import fault_tolerance
from kaitian_mpi.mpi.guard import end_job, end_with_traceback, say_labelled
from kaitian_mpi.mpi.waiting import nap

Method = Callable[..., None]
Calls = Sequence[tuple[Any, ...]]

_KEPT_WORKS = 16


class Finished(Work):
    """A collective that is already done."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True: a collective that fails raises instead."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[torch.Tensor]:
        """Return the tensors the collective wrote."""
        return self._result

    def synchronize(self) -> None:
        """Return at once."""

    def get_future(self) -> torch.futures.Future:
        """Return a completed future of the tensors."""
        future: torch.futures.Future = _future_for(self._result)
        future.set_result(self._result)
        return future


class Queued(Work):
    """A collective that another thread carries out."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._future = _future_for(result)
        self._shown = self._future
        self._error: CollectiveError | None = None
        self._is_watched = False

    def end_with(self, record: torch.autograd.profiler.record_function) -> None:
        """End a profiler's record when it is done, and let nobody go on before."""
        self._shown = record._call_end_callbacks_on_future(self._future)

    def finish(self) -> None:
        """Mark it done; on an accelerator, once the streams of this thread are."""
        settle(self._result)
        self._future.set_result(self._result)

    def fail(self, error: CollectiveError, *, is_recorded: bool) -> None:
        """Mark it failed, for `wait` to raise.

        Where somebody has its future, the exception would crash DDP's reducer, without a word: the
        job ends instead. Where the loss of a rank `is_recorded` and will be asked for before the
        result is used, the future is completed with whatever there is.
        """
        self._error = error
        if self._is_watched and is_recorded and isinstance(error, RankLostError):
            self._future.set_result(self._result)
            return
        if self._is_watched:
            say_labelled(f"a collective failed: {error}")
            end_job(1)
        self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done.

        Raises:
            CollectiveError: it failed, or was not done within `timeout`, after which it goes on.
        """
        if timeout:
            self._wait_at_most(timeout.total_seconds())
        self._shown.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""
        return self._shown.done()

    def is_success(self) -> bool:
        """Return whether it is done."""
        return self._shown.done() and self._error is None

    def exception(self) -> CollectiveError | None:
        """Return why it failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors the collective writes."""
        return self._result

    def synchronize(self) -> None:
        """Block until it is done."""
        self._shown.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors."""
        self._is_watched = True
        return self._shown

    def _wait_at_most(self, limit_sec: float) -> None:
        began = time.perf_counter()
        while not self._shown.done():
            waited = time.perf_counter() - began
            if waited > limit_sec:
                raise CollectiveError(f"Timed out after {limit_sec:g} s, waiting for a collective")
            nap(waited)


def _future_for(tensors: list[torch.Tensor]) -> torch.futures.Future:
    # With its devices named, a future makes the waiter's stream wait for the writer's.
    return torch.futures.Future(devices=ordered_devices(tensors))


@dataclass(frozen=True)
class _Task:
    name: str
    method: Method
    calls: Calls
    work: Queued
    streams: Streams


class Worker:
    """Runs tasks one after the other; in the caller's thread where it may, else in its own.

    After a `CollectiveError` the ranks no longer agree on what comes next, so all that follows
    fails with it. Any other error in the worker's thread ends the job with its traceback: a rank
    that went on alone would leave the others waiting.
    """

    def __init__(self, name: str, streams: SideStreams) -> None:
        """Prepare; `streams` are where the thread works on tensors of an accelerator."""
        self.broken: CollectiveError | None = None
        """Why no more tasks can be carried out."""
        self.records_losses = False
        """Whether somebody asks for `broken` before using what a future delivers."""
        self._streams = streams
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._waiting = 0
        self._count_lock = threading.Lock()
        self._name = name
        # DDP's join keeps only the C++ half of the work of its one-element all_reduce, which then
        # needs the Python half to live on.
        self._kept: deque[Queued] = deque(maxlen=_KEPT_WORKS)
        self._thread: threading.Thread | None = None

    def run(
        self,
        name: str,
        method: Method,
        calls: Calls,
        result: list[torch.Tensor],
        in_background: bool,
    ) -> Work:
        """Carry out a collective, after all those given before it.

        Args:
            name: the operation, for errors.
            method: what does it.
            calls: the arguments of each call of `method`.
            result: the tensors it writes.
            in_background: False where the caller will wait for it anyway; it then runs in the
                caller's own thread if nothing is queued, which saves two thread switches.

        Raises:
            CollectiveError: it failed in the caller's thread, or the worker is broken.
        """
        if self._thread is not None and threading.current_thread() is self._thread:
            # A future's callback asks for more, as PowerSGD's hook does, and may wait: queued,
            # it would never come. Here and now is the same place in the order on every rank.
            self._attempt(name, method, calls)
            return Finished(result)
        if not in_background and self._waiting == 0 and self._turn.acquire(blocking=False):
            try:
                self._attempt(name, method, calls)
            finally:
                self._turn.release()
            return Finished(result)
        work = Queued(result)
        if sum(tensor.numel() for tensor in result) <= 1:
            self._kept.append(work)
        task = _Task(name, method, calls, work, self._streams.after_caller(result, calls))
        with self._count_lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        self._tasks.put(task)
        return work

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            with self._turn, task.streams:
                error = self._error_of(task)
                with self._count_lock:
                    self._waiting -= 1
                if error is None:
                    task.work.finish()
                else:
                    task.work.fail(error, is_recorded=self.records_losses)

    def _error_of(self, task: _Task) -> CollectiveError | None:
        try:
            self._attempt(task.name, task.method, task.calls)
        except CollectiveError as error:
            return error
        except BaseException:
            end_with_traceback("a collective failed:\n")
        return None

    def _attempt(self, name: str, method: Method, calls: Calls) -> None:
        if self.broken is not None:
            raise type(self.broken)(f"{name}: this process group failed before: {self.broken}")
        try:
            for arguments in calls:
                method(*arguments)
        except CollectiveError as error:
            self.broken = error.in_operation(name)
            raise self.broken from None
        except Exception as error:
            if not fault_tolerance.is_loss(error):
                raise
            fault_tolerance.revoke_all()
            self.broken = RankLostError(f"{name}: a rank is lost ({error})")
            raise self.broken from None
