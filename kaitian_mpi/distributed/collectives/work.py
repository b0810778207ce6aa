"""The `Work` and future objects that a collective returns to its caller.

A future's callbacks keep their place in the order of collectives, and its error is raised for every
reader.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed.collectives.staging import StreamEnd, ends_of_streams, ordered_devices
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.runtime.polling import wait_until

Callback = Callable[[Any], Any]


class CallbackQueue(Protocol):
    """The queue of the thread that completes a future."""

    def call_back(self, callback: Callable[[], None], tensors: list[torch.Tensor]) -> None:
        """Run `callback` after everything queued so far, and before everything queued later."""

    def run_until(self, done: Callable[[], bool]) -> None:
        """If called in the thread that completes futures, run queued tasks until `done`."""


@not_compiled
class OrderedFuture(torch.futures.Future):
    """A future whose Python callbacks run in the queue's order, at the place of their attachment.

    A callback may call collectives. Whether a future is done when a callback is attached depends on
    timing, which differs between ranks: a callback that ran as soon as the future is done could
    come before another collective on one rank and after it on another. So a callback runs after all
    collectives called before it was attached, and before those called later.
    """

    # Without a dictionary, because each queued collective creates one.
    __slots__ = ("_queue", "_tensors")

    def __init__(self, queue: CallbackQueue | None, tensors: list[torch.Tensor]) -> None:
        """Create a future of a collective's result; `queue` is None for messages, without order."""
        super().__init__(devices=ordered_devices(tensors))
        self._queue = queue
        self._tensors = tensors

    def then(self, callback: Callback) -> torch.futures.Future:  # type: ignore[override]
        if self._queue is None or self.done():
            return super().then(callback)
        result = OrderedFuture(self._queue, self._tensors)

        def call() -> None:
            try:
                value = callback(self)
            except Exception as error:
                result.fail(error)
            else:
                _block_for_streams(self._tensors)  # which the callback may have given work
                result.set_result(value)

        self._queue.call_back(call, self._tensors)
        return result

    def add_done_callback(self, callback: Callback) -> None:
        if self._queue is None or self.done():
            super().add_done_callback(callback)
        else:
            plain: torch.futures.Future = torch.futures.Future()
            plain.add_done_callback(lambda _: callback(self))
            self._queue.call_back(lambda: plain.set_result(None), self._tensors)

    def wait(self) -> Any:
        if self._queue is not None:
            self._queue.run_until(self.done)
        return super().wait()

    def fail(self, error: Exception) -> None:
        """Complete it with an error, raised for everyone who waits for it or reads it."""
        self._set_unwrap_func(_raise)
        self.set_result(Failure(error))


class Failure:
    """The value of a failed future, which raises its error.

    `torch.futures.Future.set_exception` stores the exception itself as the value. Python raises it,
    but DDP's C++ reducer searches it for tensors and ends in a segmentation fault. The reducer
    pickles a value to search it, or converts it to a string for its own error message; this class
    raises the error in both.
    """

    def __init__(self, error: Exception) -> None:
        self._error = _without_frames(error)

    def raise_error(self) -> NoReturn:
        """Raise the error."""
        raise _without_frames(self._error)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.raise_error()

    def __str__(self) -> str:
        self.raise_error()


def _without_frames(error: Exception) -> Exception:
    """Return an error that ranks survive without its traceback.

    A future has its error in C++, where the collector does not look: a frame that has the future,
    and is in the traceback, would stay for good, with the activations of its step.
    """
    return type(error)(str(error)) if isinstance(error, CollectiveError) else error


def _block_for_streams(tensors: list[torch.Tensor]) -> None:
    """Wait for this thread's streams of the tensors' devices, unless a future does."""
    for end in ends_of_streams(tensors):
        if not end.is_handled_by_futures:
            end.synchronize()


def _raise(value: Any) -> None:
    if isinstance(value, Failure):
        value.raise_error()


@not_compiled
class Finished(Work):
    """The work of a collective that is already done."""

    __slots__ = ("_result",)

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        """Return at once."""

    def get_future(self) -> torch.futures.Future:
        _block_for_streams(self._result)
        future: torch.futures.Future = torch.futures.Future(devices=ordered_devices(self._result))
        future.set_result(self._result)
        return future


@not_compiled
class Queued(Work):
    """The work of a collective that another thread executes.

    On an accelerator it is like NCCL's work as far as MPI allows: `wait` blocks the host only until
    that thread has queued the last copy to the device, and then makes the current stream wait for
    it. It cannot return earlier, as NCCL's does: a stream cannot be made to wait for an event that
    is not recorded yet, and the copy cannot be queued before the host has received the data.
    """

    __slots__ = (
        *("_ends", "_error", "_future", "_has_future_reader", "_result"),
        "is_error_seen",
        "name",
    )

    def __init__(
        self, name: str, result: list[torch.Tensor], queue: CallbackQueue | None = None
    ) -> None:
        """Create a work that is not done; `queue` orders the callbacks of its future.

        `name` is the operation's.
        """
        super().__init__()
        self.name = name
        self._result = result
        self._future = OrderedFuture(queue, result)
        self._error: Exception | None = None
        self._ends: list[StreamEnd] = []
        self._has_future_reader = False
        self.is_error_seen = False
        """Whether anyone has asked for the outcome."""

    def finish(self) -> None:
        """Mark it done, but for what this thread's streams of an accelerator have still to do.

        A future that was handed out is only completed when they have done it, unless
        `torch.futures.Future` handles the device's streams itself.
        """
        self._ends = ends_of_streams(self._result)
        if self._has_future_reader:
            self._block_for_streams()
        self._future.set_result(self._result)

    def fail(self, error: Exception, *, is_recorded: bool = False) -> None:
        """Mark it failed; `wait` and the future raise the error.

        If the future was handed out and the loss of a rank `is_recorded`, to be checked before the
        result is used, the future is instead completed with whatever the tensors contain.
        """
        self._error = error
        if self._has_future_reader and is_recorded and isinstance(error, RankLostError):
            self._future.set_result(self._result)
        else:
            self._future.fail(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done, but for work of the device: the current stream waits for that."""
        if timeout and not wait_until(self._future.done, limit := timeout.total_seconds()):
            raise CollectiveError(
                f"Timed out after {limit:g} s in wait(): {self.name} goes on, and may be waited "
                "for again"
            )
        self.is_error_seen = True
        if recorder.current is None:
            self._future.wait()
        else:
            with recorder.current.wait("wait for a collective"):
                self._future.wait()
        for end in self._ends:
            end.let_current_stream_wait()
        return True

    def is_completed(self) -> bool:
        """Return whether it is done, by the device as well, or has failed."""
        return self._future.done() and all(end.is_reached() for end in self._ends)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        self.is_error_seen = True
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        self._has_future_reader = self.is_error_seen = True
        # In this order, and in the other one in `finish`: one of the two sees what the other wrote.
        self._block_for_streams()
        return self._future

    def _block_for_streams(self) -> None:
        for end in self._ends:
            if not end.is_handled_by_futures:
                end.synchronize()
