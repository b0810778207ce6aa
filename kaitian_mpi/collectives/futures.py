"""Futures of collectives, whose callbacks keep the order and whose errors reach every reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kaitian_mpi.collectives.staging import ordered_devices
from kaitian_mpi.collectives.torch_tools import not_compiled

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
