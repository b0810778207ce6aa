"""What a caller holds of a collective: done already, or carried out by another thread."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives.futures import CallbackQueue, OrderedFuture, finished_future
from kaitian_mpi.collectives.staging import settle
from kaitian_mpi.collectives.torch_tools import not_compiled
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.runtime.polling import nap


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
