"""A supervisor's request to a running job: save, and end between two steps.

It is a file in the run folder with the job's ID, which only the supervisor and its ranks know.
Imports neither torch nor MPI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.observe.files import replacing
from kaitian_mpi.runtime.launcher import SUPERVISED

_NAME = "restart-request"
_EVERY_SEC = 0.5
_MAX_BYTES = 256


def request_restart(folder: Path, job_id: str) -> None:
    """Ask a job to save and to end between two steps; may raise `OSError`."""
    with replacing(folder / _NAME) as file:
        file.write(job_id.encode())


def withdraw_request(folder: Path) -> bool:
    """Remove a request; return whether there was one, which the job has not fulfilled then."""
    try:
        (folder / _NAME).unlink()
    except OSError:
        return False
    return True


class RestartRequest:
    """Whether the job is asked to save and end, on the rank that writes the run folder."""

    def __init__(
        self,
        folder: Path | None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without looking."""
        self._job_id = environ.get(SUPERVISED, "")
        self._file = None if folder is None else folder / _NAME
        self._clock = clock
        self._next = 0.0
        self._is_made = False

    def is_made(self) -> bool:
        """Return whether the request has been made; looks for it every half second."""
        if self._file is None or not self._job_id or self._is_made:
            return self._is_made
        now = self._clock()
        if now >= self._next:
            self._next = now + _EVERY_SEC
            self._is_made = _read(self._file) == self._job_id
        return self._is_made

    def fulfil(self) -> None:
        """Remove the request: the state is saved, and the job ends."""
        if self._file is not None and self._is_made:
            with suppress(OSError):
                self._file.unlink()

    def refuse(self) -> None:
        """Ignore the request from now on: the state could not be saved."""
        self._file, self._is_made = None, False


def _read(file: Path) -> str:
    try:  # whatever lies there, nothing is waited for
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
