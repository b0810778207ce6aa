"""Writes checkpoints in a background thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.state_transfer import side_by_side

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes checkpoints in a thread; the caller waits only for its own copy of the state.

    The thread exists only while there is something to write, so that a job that ends with an
    exception completes its last checkpoint and does not hang. Not thread-safe.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        """Start nothing yet; checkpoints will go to `files`."""
        self._files = files
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._writing: int | None = None
        self._waiting: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._spare: dict[str, Any] | None = None
        self._bug: BaseException | None = None
        self._last_written: int | None = None

    @property
    def last_written(self) -> int | None:
        """The step of the last checkpoint that this object wrote; None before the first."""
        return self._last_written

    def submit(self, state: dict[str, Any], description: dict[str, Any]) -> bool:
        """Write a checkpoint in the background; return at once.

        While an earlier one is being written, only the newest is queued; one that it replaces is
        logged and never written.

        Args:
            state: now owned by the writer; the caller must not change it.
            description: as in `CheckpointFiles.write`.

        Returns:
            Whether it replaced a queued one.

        Raises:
            Exception: an earlier write raised something other than OSError or UserError; this one
                is not queued.
        """
        self._raise_bug()
        step = description["step"]
        with self._lock:
            if self._thread is None:
                first = state, description
                thread = threading.Thread(target=self._work, args=first, name="checkpoint-writer")
                thread.start()
                self._thread, self._writing = thread, step
                return False
            replaced, self._waiting = self._waiting, (state, description)
            writing = self._writing
        if replaced is None:
            return False
        self._spare = replaced[0]
        _log.warning(
            "checkpoint of step %d is skipped: step %d is still being written, and step %d is next",
            *(replaced[1]["step"], writing, step),
        )
        return True

    def write_now(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        """Write a checkpoint, after those submitted before, and return when it is written.

        Args:
            state: stays the caller's.
            description: as in `CheckpointFiles.write`.

        Raises:
            Exception: a write raised something other than OSError or UserError.
        """
        self.close()
        self._write(state, description)

    def take_spare(self) -> dict[str, Any] | None:
        """Return a state whose memory can be reused for the next copy; None if there is none."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare

    def wait(self) -> None:
        """Wait until every submitted checkpoint is on disk or has failed.

        Raises:
            Exception: a write raised something other than OSError or UserError.
        """
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
            except BaseException as error:  # raised again in the thread that submits
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
            self._last_written = step

    def _kept(self) -> str:
        step = self._last_written
        if step is None:  # an earlier job may have written one
            with contextlib.suppress(OSError):  # on a faulty disk, listing may fail as well
                step = max(self._files.steps(), default=None)
        return "there is none yet" if step is None else f"the one of step {step} is kept"


def without_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same as `copy_to_host`, but sharing the tensors of `state` where possible."""
    with torch.no_grad():
        return _copy(state, None, share=True)


def copy_to_host(state: dict[str, Any], into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a copy of a nested state with its tensors in host memory, detached.

    Every mapping becomes a plain dict.

    Args:
        state: as in `CheckpointFiles.write`, with tensors on any device.
        into: an earlier copy that is no longer needed: its tensors of the right shape and dtype are
            overwritten and reused. Allocating new memory takes many times as long as copying.
    """
    with torch.no_grad():
        return _copy(state, into)


def _copy(value: Any, into: Any, share: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach() if share and _is_whole(value) else _copy_tensor(value, into)
    if not isinstance(value, (dict, list, tuple)):
        return value
    items = [_copy(item, old, share) for item, old in side_by_side(value, into)]
    if isinstance(value, dict):
        return dict(zip(value, items, strict=True))
    return items if isinstance(value, list) else tuple(items)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory and not part of a larger storage."""
    if not tensor.is_cpu:
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _copy_tensor(tensor: torch.Tensor, into: Any) -> torch.Tensor:
    fits = (
        isinstance(into, torch.Tensor)
        and into.shape == tensor.shape
        and into.dtype == tensor.dtype
        and into.is_cpu
    )
    # Not a view of a larger storage, which torch.save would write in full.
    target = into if fits else torch.empty_like(tensor, device="cpu")
    return target.copy_(tensor)
