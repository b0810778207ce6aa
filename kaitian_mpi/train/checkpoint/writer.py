"""Writes checkpoints in a background thread."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.checkpoint.files import CheckpointFiles

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes checkpoints in a thread; the caller waits only for its own copy of the state.

    A job that ends with an exception completes its last checkpoint. A write that fails with OSError
    or UserError is logged. Any other exception is a bug, and a later call raises it.

    Attributes:
        last_written: the step of the last checkpoint that this object wrote; None before the first.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        """Start nothing yet; checkpoints will go to `files`."""
        self.last_written: int | None = None
        self._files = files
        self._pool = ThreadPoolExecutor(1, "checkpoint-writer")
        self._last: Future[None] | None = None
        self._bug: BaseException | None = None
        self._submitted: tuple[dict[str, Any], int] = {}, 0
        self._spare: dict[str, Any] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a submitted checkpoint is neither on disk nor has failed."""
        return self._last is not None and not self._last.done()

    def submit(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        """Write a checkpoint in the background; return at once.

        While an earlier one is being written, only the newest is queued; one that it replaces is
        logged and never written.
        """
        step = description["step"]
        last, self._last = self._last, None
        if last is not None and last.cancel():
            self._spare, skipped = self._submitted
            _log.warning(
                "checkpoint of step %d is skipped: an earlier one is still being written, and step "
                "%d is next",
                *(skipped, step),
            )
        self._raise_bug()
        self._submitted = state, step
        self._last = self._pool.submit(self._work, state, description)

    def write_now(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        """Write a checkpoint after those submitted before; return when it is written."""
        self.close()
        self._write(state, description)

    def take_spare(self) -> dict[str, Any] | None:
        """Return a state whose memory can be reused for the next copy; None if there is none."""
        spare, self._spare = self._spare, None
        return spare

    def wait(self) -> None:
        """Wait until every submitted checkpoint is on disk or has failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
        self._raise_bug()

    def close(self) -> None:
        """Wait as `wait` does, and free the memory kept for reuse."""
        try:
            self.wait()
        finally:
            self._submitted, self._spare = ({}, 0), None

    def _work(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        try:
            self._write(state, description)
        except BaseException as error:
            self._bug = error  # a later call raises it
        finally:
            self._spare = state

    def _raise_bug(self) -> None:
        error, self._bug = self._bug, None
        if error is not None:
            raise error

    def _write(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        step = description["step"]
        try:
            self._files.write(state, description)
        except (OSError, UserError) as error:
            _log.warning(
                "checkpoint of step %d could not be written: %s; training continues, %s",
                *(step, getattr(error, "strerror", None) or error, self._kept()),
            )
        else:
            self.last_written = step

    def _kept(self) -> str:
        step = self.last_written
        if step is None:  # an earlier job may have written one
            with contextlib.suppress(OSError):  # on a faulty disk, listing may fail as well
                step = max(self._files.steps(), default=None)
        return "there is none yet" if step is None else f"the one of step {step} is kept"
