"""A claim on a run folder: one job at a time trains in it.

It is a lock on a file in the folder, so that it ends with the process that holds it, however that
ends, and is seen on every host that shares the file system. Where files cannot be locked, nothing
is claimed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kaitian_mpi.errors import UserError

_NAME = ".job"
_PATIENCE_SEC = 0.5  # a job that only looks whether the folder is free locks it for a moment
_POLL_SEC = 0.1


class Claim:
    """What this process holds of a folder, until `close`.

    Attributes:
        is_renewed: whether the job has claimed the folder before, by a rank that may be lost.
    """

    def __init__(self, folder: Path, job: str) -> None:
        """Claim a folder.

        Args:
            folder: of the run.
            job: the ID that all ranks of the job have, and the jobs that take its place.

        Raises:
            UserError: another job has claimed it.
        """
        self._path, self._descriptor, self.is_renewed = folder / _NAME, -1, False
        deadline = time.monotonic() + _PATIENCE_SEC
        while self._descriptor < 0:
            descriptor = _open(self._path)
            if descriptor is None:
                return
            holder = _read(descriptor)
            self.is_renewed = self.is_renewed or holder.get("job") == job
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, self._path):
                    self._descriptor = descriptor
                    self._describe(job)
                    return
            except (BlockingIOError, PermissionError):  # POSIX allows both
                if holder.get("job") == job:
                    self._remove()  # of a rank of ours: lost, or on standby
                elif time.monotonic() > deadline:
                    raise _claimed(folder, holder) from None
            except OSError:  # the file system does not support locks
                os.close(descriptor)
                return
            os.close(descriptor)
            time.sleep(_POLL_SEC)

    def close(self) -> None:
        """Let other jobs train in the folder; does nothing after the first call."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if _is_at(descriptor, self._path):
                self._remove()
            os.close(descriptor)

    def _describe(self, job: str) -> None:
        content = {
            "job": job,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with suppress(OSError):  # the disk is full, but the lock holds
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(content).encode(), 0)

    def _remove(self) -> None:
        with suppress(OSError):
            os.remove(self._path)


def check_unclaimed(folder: Path) -> None:
    """Check that no job has claimed a folder, which need not exist.

    Raises:
        UserError: one has.
    """
    deadline = time.monotonic() + _PATIENCE_SEC
    while True:
        try:
            descriptor = os.open(folder / _NAME, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise _claimed(folder, _read(descriptor)) from None
        except OSError:
            return
        finally:
            os.close(descriptor)
        time.sleep(_POLL_SEC)


def _open(path: Path) -> int | None:
    """Open the file, and create it if it is missing; return None if it cannot be written."""
    for _ in range(2):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            check_unclaimed(path.parent)  # what another user's job has left behind is removed
            with suppress(OSError):
                os.remove(path)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _read(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, 1000, 0))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _claimed(folder: Path, holder: dict[str, Any]) -> UserError:
    known = holder.keys() >= {"process", "host", "since"}
    who = " (process {process} on {host}, since {since})".format(**holder) if known else ""
    return UserError(
        f"--run-dir {folder}: another job is training in it{who}; wait for its end, or name "
        f"another folder; if that process is gone, remove {folder / _NAME}"
    )
