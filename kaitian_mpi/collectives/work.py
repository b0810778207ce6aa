"""What a caller holds of a collective: its work and its future.

Callbacks of a future keep their order, and its error reaches every reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives.compiler import not_compiled
from kaitian_mpi.collectives.staging import ordered_devices, settle
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.runtime.polling import nap

Callback = Callable[[Any], Any]


class CallbackQueue(Protocol):
    """What a future needs of whoever completes it."""

    def call_back(self, callback: Callable[[], None], tensors: list[torch.Tensor]) -> None:
        """Run `callback` after all that has been given, and before all that will be."""
        ...

    def run_until(self, done: Callable[[], bool]) -> None:
        """In the thread that would complete a future, go on with what is queued until it is."""
        ...


@not_compiled
class OrderedFuture(torch.futures.Future):
    """A future whose Python callbacks take the place in the queue where they were attached.

    A callback may ask for collectives. Whether a future is done when its callback is attached is a
    matter of time, and another one on each rank: a callback that ran as soon as the future is done
    would ask before a collective that the rank has given meanwhile here, and after it there. So
    a callback waits for all collectives given before it was attached, and those given later wait
    for it.
    """

    def __init__(self, queue: CallbackQueue | None, tensors: list[torch.Tensor]) -> None:
        """Make a future of what a collective writes.

        Args:
            queue: completes it; None for a message, beside which there is no order to keep.
            tensors: what it will hold, for the streams of their devices.
        """
        super().__init__(devices=ordered_devices(tensors))
        self._queue = queue
        self._tensors = tensors

    def then(self, callback: Callback) -> torch.futures.Future:  # type: ignore[override]
        """Return a future of what `callback` returns, when it is given this one."""
        if self._queue is None or self.done():
            return super().then(callback)
        result = OrderedFuture(self._queue, self._tensors)

        def call() -> None:
            try:
                value = callback(self)
            except Exception as error:
                result.fail(error)
            else:
                result.set_result(value)

        self._queue.call_back(call, self._tensors)
        return result

    def add_done_callback(self, callback: Callback) -> None:
        """Call `callback` with this future; what it raises is logged."""
        if self._queue is None or self.done():
            super().add_done_callback(callback)
        else:
            plain: torch.futures.Future = torch.futures.Future()
            plain.add_done_callback(lambda _: callback(self))
            self._queue.call_back(lambda: plain.set_result(None), self._tensors)

    def wait(self) -> Any:
        """Block until it is done; return what it holds, or raise its error."""
        if self._queue is not None:
            self._queue.run_until(self.done)
        return super().wait()

    def fail(self, error: Exception) -> None:
        """Complete it with an error, which everybody who waits for it or reads it gets."""
        self._set_unwrap_func(_raise)
        self.set_result(Failure(error))


class Failure:
    """What a failed future holds.

    `torch.futures.Future.set_exception` makes the exception the future's value, which Python
    raises. DDP's reducer, in C++, looks for tensors in it and ends in a segmentation fault. It
    looks by pickling it, or shows it as a string in an error of its own; here, both raise the
    error.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise the error."""
        raise self.error

    def __str__(self) -> str:
        """Raise the error."""
        raise self.error


def finished_future(tensors: list[torch.Tensor]) -> torch.futures.Future:
    """Return a completed future of tensors."""
    future: torch.futures.Future = torch.futures.Future(devices=ordered_devices(tensors))
    future.set_result(tensors)
    return future


def _raise(value: Any) -> None:
    if isinstance(value, Failure):
        raise value.error


@not_compiled
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
        return finished_future(self._result)


@not_compiled
class Queued(Work):
    """A collective that another thread carries out."""

    def __init__(self, result: list[torch.Tensor], queue: CallbackQueue | None = None) -> None:
        """Make it.

        Args:
            result: the tensors it writes.
            queue: what keeps the order of its future's callbacks; None where they have none.
        """
        super().__init__()
        self._result = result
        self._future = OrderedFuture(queue, result)
        self._error: Exception | None = None
        self._is_watched = False
        self._records: list[torch.futures.Future] = []
        self.is_error_seen = False
        """Whether somebody has asked for its outcome."""

    def end_with(self, record: torch.autograd.profiler.record_function) -> None:
        """End a profiler's record when it is done."""
        end: torch.futures.Future = torch.futures.Future()
        record._call_end_callbacks_on_future(end)
        self._records.append(end)
        if self._future.done():
            self._end_records()

    def finish(self) -> None:
        """Mark it done; on an accelerator, once the streams of this thread are."""
        settle(self._result)
        self._complete(None)

    def fail(self, error: Exception, *, is_recorded: bool = False) -> None:
        """Mark it failed, for `wait` and whoever has its future to raise.

        Where somebody has the future, and the loss of a rank `is_recorded` and will be asked for
        before the result is used, the future is completed with whatever there is.
        """
        self._error = error
        passed_over = self._is_watched and is_recorded and isinstance(error, RankLostError)
        self._complete(None if passed_over else error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done.

        Raises:
            CollectiveError: it failed, or was not done within `timeout`, after which it goes on.
            Exception: as it was raised by the collective.
        """
        if timeout:
            self._wait_at_most(timeout.total_seconds())
        self.is_error_seen = True
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""
        return self._future.done()

    def is_success(self) -> bool:
        """Return whether it is done."""
        return self._future.done() and self._error is None

    def exception(self) -> Exception | None:
        """Return why it failed."""
        self.is_error_seen = True
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors the collective writes."""
        return self._result

    def synchronize(self) -> None:
        """Block until it is done."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors."""
        self._is_watched = self.is_error_seen = True
        return self._future

    def _complete(self, error: Exception | None) -> None:
        # Before anybody goes on, so that a profile that ends now has it.
        self._end_records()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.fail(error)
        self._end_records()  # of one that was added meanwhile

    def _end_records(self) -> None:
        while True:
            try:
                self._records.pop().set_result(None)
            except IndexError:
                return

    def _wait_at_most(self, limit_sec: float) -> None:
        began = time.perf_counter()
        while not self._future.done():
            waited = time.perf_counter() - began
            if waited > limit_sec:
                raise CollectiveError(f"Timed out after {limit_sec:g} s, waiting for a collective")
            nap(waited)
