"""A lock that lets one process at a time write checkpoints in a folder.

A job that was ended by a signal may still be writing its last checkpoint when the next one starts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)

_NAME = ".lock"
_POLL_SEC = 0.1  # on a network file system, each lock request is a message to its server


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Hold a folder's lock for writing; wait, without a time limit, while another process does.

    The lock belongs to the process: it is released when the process exits, and a forked child does
    not inherit it. On a file system without lock support, nothing is locked.
    """
    path = folder / _NAME
    descriptor = -1
    with suppress(OSError):
        descriptor = _lock(path)
        os.write(descriptor, f"process {os.getpid()} of {socket.gethostname()}".encode())
    try:
        yield
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                os.remove(path)  # first, so that a process waiting for it finds it gone
            os.close(descriptor)


def _lock(path: Path) -> int:
    """Return a locked descriptor of the empty file at this path, which is created if needed."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    os.truncate(descriptor, 0)
                    return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder has removed the file


def wait_for_writer(folder: Path) -> None:
    """Wait, without a time limit, until no other process writes in a folder; log which one does.

    The folder need not exist.
    """
    try:
        descriptor = os.open(folder / _NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    waited = False
    try:
        while not _is_free(descriptor):
            if not waited:
                writer = os.pread(descriptor, 200, 0).decode(errors="replace") or "a process"
                _log.info(
                    "waiting for %s, which is still writing a checkpoint in %s", writer, folder
                )
            waited = True
            time.sleep(_POLL_SEC)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both
        return False
    except OSError:  # the file system does not support locks
        return True
    return True
