"""The thread that carries out a process group's collectives, first in, first out."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives.staging import Streams, after_caller
from kaitian_mpi.mpi.guard import end_job, say_labelled

Task = Callable[[], None]


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
        """Return True: a collective that fails ends the job."""
        return True

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
    """A collective that a worker thread carries out."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._future = _future_for(result)

    def finish(self) -> None:
        """Mark it done; on an accelerator, once the streams of this thread are."""
        self._future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._future.done()

    def is_success(self) -> bool:
        """Return whether it is done: a collective that fails ends the job."""
        return self._future.done()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors the collective writes."""
        return self._result

    def synchronize(self) -> None:
        """Block until it is done."""
        self._future.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors."""
        return self._future


def _future_for(tensors: list[torch.Tensor]) -> torch.futures.Future:
    # With its devices named, a future makes the waiter's stream wait for the writer's.
    devices = {t.device for t in tensors if t.device.type in ("cuda", "xpu")}
    return torch.futures.Future(devices=sorted(devices, key=str))


class Worker:
    """Runs tasks one after the other; in the caller's thread where it may, else in its own.

    A failed task ends the job with its traceback: a future completed with an exception crashes
    DDP's reducer, and a rank that goes on alone would leave the others waiting.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Task, Queued, Streams] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._waiting = 0
        self._count_lock = threading.Lock()
        self._name = name
        self._thread: threading.Thread | None = None

    def run(self, task: Task, result: list[torch.Tensor], *, in_background: bool) -> Work:
        """Carry out a task, after all those given before it.

        Args:
            task: the collective.
            result: the tensors it writes.
            in_background: False where the caller will wait for it anyway; it then runs in the
                caller's own thread if nothing is queued, which saves two thread switches.
        """
        if threading.current_thread() is self._thread:
            # A future's callback asks for more, as PowerSGD's hook does, and may wait: queued,
            # it would never come. Here and now is the same place in the order on every rank.
            _guarded(task)
            return Finished(result)
        if not in_background and self._waiting == 0 and self._turn.acquire(blocking=False):
            try:
                _guarded(task)
            finally:
                self._turn.release()
            return Finished(result)
        work = Queued(result)
        streams = after_caller(result)
        with self._count_lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        self._tasks.put((task, work, streams))
        return work

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, work, streams = item
            with self._turn, streams:
                _guarded(task)
                with self._count_lock:
                    self._waiting -= 1
                work.finish()


def _guarded(task: Task) -> None:
    try:
        task()
    except BaseException:
        say_labelled("a collective failed:\n" + traceback.format_exc())
        end_job(1)
