"""Locks on folders: one job at a time trains in a run folder, one process at a time saves there.

A third one shows that a state is being collected, to be saved there.

A folder is locked by a lock on a file in it. The lock ends with the process that holds it, however
the process ends, and every host that shares the file system sees it. A file system without locks
gives no protection.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import read_json
from kaitian_mpi.runtime.polling import wait_until

_log = logging.getLogger(__name__)

_JOB = ".job"
_SAVING = ".lock"
_COLLECTING = ".collecting"
_PATIENCE_SEC = 0.5  # a job that only checks whether the folder is free locks it for a moment
_POLL_SEC = 0.1  # on a network file system, each lock request is a message to its server
_PROGRESS_SEC = 0.5  # and so is each change of a file's time


class _Lock:
    """An exclusive lock on a file, of this process; a forked child does not inherit it."""

    def __init__(self, path: Path, job: str = "") -> None:
        self._path = path
        self._job = job
        self._descriptor = -1

    def take(self) -> bool:
        """Return whether this process holds the lock now, or files cannot be locked here."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(self._path, flags, 0o666)
            except PermissionError:  # another user's file: locked, or left over
                if _is_locked(self._path):
                    return False
                os.remove(self._path)
                descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            if isinstance(error, PermissionError):
                _log.warning("%s cannot be locked against other jobs: %s", self._path, error)
            return True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return not isinstance(error, (BlockingIOError, PermissionError))  # POSIX allows both
        if not _is_at(descriptor, self._path):  # the previous holder has removed it
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        holder = {
            "job": self._job,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with suppress(OSError):  # the disk is full, but the lock holds
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        return True

    def close(self) -> None:
        """Release the lock; does nothing after the first call."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            if _is_at(descriptor, self._path):
                # Before the lock ends, so that no waiting process locks this file.
                with suppress(OSError):
                    os.remove(self._path)
            os.close(descriptor)


class Claim(_Lock):
    """A job's claim on its run folder, until `close`.

    Attributes:
        is_renewed: whether the job has claimed the folder before, by a rank that may be lost.
    """

    def __init__(self, folder: Path, job: str) -> None:
        path = folder / _JOB
        self.is_renewed = read_json(path).get("job") == job
        if self.is_renewed:
            with suppress(OSError):
                os.remove(path)  # from a rank that is lost or on standby
        super().__init__(path, job)
        _wait_until(folder, self.take)


def check_unclaimed(folder: Path) -> None:
    """Check that no job has claimed a folder, which need not exist.

    Raises:
        UserError: a job is training in the folder.
    """
    _wait_until(folder, lambda: not _is_locked(folder / _JOB))


@contextmanager
def saving_in(folder: Path) -> Iterator[None]:
    """Hold a folder's lock for saving; wait, without a time limit, while another process does."""
    lock = _Lock(folder / _SAVING)
    while not lock.take():
        time.sleep(_POLL_SEC)
    try:
        yield
    finally:
        lock.close()


def is_saving_in(folder: Path) -> bool:
    """Return whether another process saves in a folder, which need not exist."""
    return _is_locked(folder / _SAVING)


class _CollectionLock(_Lock):
    """Held while a state is being collected; its file's time shows when a piece last arrived."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / _COLLECTING)
        self._shown_at = -math.inf

    def show_progress(self) -> None:
        """Show that a piece has arrived, unless that was shown a moment ago."""
        now = time.monotonic()
        if self._descriptor >= 0 and now - self._shown_at >= _PROGRESS_SEC:
            self._shown_at = now
            with suppress(OSError):
                os.utime(self._descriptor)


@contextmanager
def collecting_in(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Show that this process collects a state to be saved in a folder; None: show nothing.

    Yields:
        A function to be called when a piece of the state has arrived. A supervisor that is to stop
        the job waits as long as this happens.
    """
    lock = _CollectionLock(folder or Path())
    if folder is not None:
        lock.take()
    try:
        yield lock.show_progress
    finally:
        lock.close()


def collection_progress(folder: Path) -> int | None:
    """Return a number that changes as another process collects a state to be saved in a folder.

    None if none does, or the process that did has ended. The folder need not exist.
    """
    path = folder / _COLLECTING
    if not _is_locked(path):
        return None
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it has just ended
        return None


def wait_for_save(folder: Path) -> None:
    """Wait, without a time limit, until no other process saves in a folder; log its name.

    A job that was ended by a signal may still be saving when the next one starts. The folder need
    not exist.
    """
    path = folder / _SAVING
    is_logged = False
    while _is_locked(path):
        holder = read_json(path)
        if holder and not is_logged:
            is_logged = True
            _log.info(
                "waiting for process %s on %s, which is still writing a checkpoint in %s",
                holder.get("process"),
                holder.get("host"),
                folder,
            )
        time.sleep(_POLL_SEC)


def _is_locked(path: Path) -> bool:
    """Return whether another process holds a lock on a file, which need not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, (BlockingIOError, PermissionError))
    finally:
        os.close(descriptor)
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _wait_until(folder: Path, is_free: Callable[[], bool]) -> None:
    """Wait briefly until a folder can be claimed, or raise a `UserError`."""
    if wait_until(is_free, _PATIENCE_SEC, _POLL_SEC, min_nap_sec=_POLL_SEC):
        return
    holder = read_json(folder / _JOB)
    who = ""
    if holder.keys() >= {"process", "host", "since"}:
        who = " (process {process} on {host}, since {since})".format(**holder)
    raise UserError(
        f"--run-dir {folder}: another job is training in it{who}; wait until it ends, or "
        f"choose another folder; if that process no longer exists, remove {folder / _JOB}"
    )
