"""Writes checkpoints in a background thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.checkpoint.files import CheckpointFiles

_log = logging.getLogger(__name__)

_Submission = tuple[dict[str, Any], dict[str, Any]]


class BackgroundWriter:
    """Writes checkpoints in a thread; the caller waits only for its own copy of the state.

    The thread exists only while there is something to write, so that a job that ends with an
    exception completes its last checkpoint and does not hang. Not thread-safe.

    A write that fails with OSError or UserError is logged. Any other exception is a bug, and the
    next call raises it.

    Attributes:
        last_written: the step of the last checkpoint that this object wrote; None before the first.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        """Start nothing yet; checkpoints will go to `files`."""
        self.last_written: int | None = None
        self._files = files
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._writing: int | None = None
        self._waiting: _Submission | None = None
        self._spare: dict[str, Any] | None = None
        self._bug: BaseException | None = None

    def submit(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        """Write a checkpoint in the background; return at once.

        While an earlier one is being written, only the newest is queued; one that it replaces is
        logged and never written.

        Args:
            state: now owned by the writer; the caller must not change it.
            description: as in `CheckpointFiles.write`.
        """
        self._raise_bug()
        step = description["step"]
        with self._lock:
            if self._thread is None:
                first = state, description
                thread = threading.Thread(target=self._work, args=first, name="checkpoint-writer")
                thread.start()
                self._thread, self._writing = thread, step
                return
            replaced, self._waiting = self._waiting, (state, description)
            writing = self._writing
        if replaced is not None:
            self._spare = replaced[0]
            _log.warning(
                "checkpoint of step %d is skipped: step %d is still being written, and step %d is "
                "next",
                *(replaced[1]["step"], writing, step),
            )

    def write_now(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        """Write a checkpoint after those submitted before; return when it is written.

        Args:
            state: stays the caller's.
            description: as in `CheckpointFiles.write`.
        """
        self.close()
        self._write(state, description)

    def take_spare(self) -> dict[str, Any] | None:
        """Return a state whose memory can be reused for the next copy; None if there is none."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare

    def wait(self) -> None:
        """Wait until every submitted checkpoint is on disk or has failed."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        self._raise_bug()

    def close(self) -> None:
        """Wait as `wait` does, and free the memory kept for reuse."""
        try:
            self.wait()
        finally:
            self._spare = None

    def _raise_bug(self) -> None:
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def _work(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        while True:
            try:
                self._write(state, description)
            except BaseException as error:
                self._bug = error
            with self._lock:
                self._spare = state
                if self._waiting is None:
                    self._thread = self._writing = None
                    return
                (state, description), self._waiting = self._waiting, None
                self._writing = description["step"]

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
