"""Folders for a single job: the run folder, with requests to the job, and that for snapshots.

The latter is in the host's memory and keeps a job's snapshots between starts. `/dev/shm` is shared
with the host's other users, and training resumes from a snapshot without confirmation. So the
folder must be accessible to this user only; any other is rejected.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import replacing
from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.runtime.mpi_libraries import FORWARDED_PREFIX

SNAPSHOTS_VARIABLE = f"{FORWARDED_PREFIX}KAITIAN_SNAPSHOTS"
"""The variable with the snapshots' name, kept secret, unlike a flag."""
SHM = Path("/dev/shm")  # noqa: S108  # every use is checked, see `is_private`
_PRIVATE = 0o700
_REQUEST = "restart-request"  # a file with the job's ID, which only its supervisor knows
_LOOK_EVERY_SEC = 0.5


def snapshots_name(given: str, environ: Mapping[str, str]) -> str:
    """Return the name given for snapshots, or kaitian-supervise's; empty if none are kept."""
    name = given or environ.get(SNAPSHOTS_VARIABLE, "")
    if name and not (name.isascii() and name.isalnum()):
        raise UserError(f"{SNAPSHOTS_VARIABLE}={name!r} is not a name; use letters and digits only")
    return name


def snapshot_folder(name: str) -> Path:
    """Return this host's folder for the snapshots of this name; it need not exist."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return SHM / f"kaitian-{name}-{host}"


def is_private(folder: Path) -> bool:
    """Return whether a folder exists; if it does, it is accessible to this user only."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; give --snapshots another name") from error
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if is_own and stat.S_IMODE(found.st_mode) == _PRIVATE:
        return True
    raise UserError(
        f"{folder}: it is not a folder of mode 700 that belongs to you, so it is not used; "
        "remove it, or give --snapshots another name"
    )


def make_private(folder: Path) -> None:
    """Create a folder that only this user can access, unless it exists.

    Raises:
        UserError: it exists and is not accessible to this user only.
        OSError: it cannot be created.
    """
    with suppress(FileExistsError):  # perhaps created by another rank of ours
        folder.mkdir(mode=_PRIVATE)
    is_private(folder)


def remove_private(folder: Path) -> None:
    """Remove a folder and its content, if only this user can access it; never raises."""
    with suppress(UserError):  # it belongs to another user, who has to remove it
        if is_private(folder):
            shutil.rmtree(folder, ignore_errors=True)


def make_new_folder(wanted: Path) -> Path:
    """Create a new folder and return it: `wanted`, or else `wanted-2`, `wanted-3` and so on.

    Jobs that want the same name at the same moment each get their own folder.
    """
    path, number = wanted, 1
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                path = wanted.with_name(f"{wanted.name}-{number}")
            else:
                return path
    except OSError as error:
        raise UserError(
            f"{wanted}: {error.strerror}; choose a writable folder with --run-dir"
        ) from error


def request_restart(folder: Path, job_id: str) -> None:
    """Ask a job to save and to end between two steps; may raise `OSError`."""
    with replacing(folder / _REQUEST) as file:
        file.write(job_id.encode())


def withdraw_request(folder: Path) -> bool:
    """Remove a request; return whether there was one, which the job has not fulfilled then."""
    try:
        (folder / _REQUEST).unlink()
    except OSError:
        return False
    return True


class RestartRequest:
    """Whether the job is asked to save and end, on the rank that writes the run folder."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._job_id = os.environ.get(SUPERVISED, "")
        self._next = 0.0
        self._is_made = False

    def is_made(self) -> bool:
        """Return whether the request has been made; looks for it every half second."""
        if self._folder is not None and self._job_id and self._clock() >= self._next:
            self._next = self._clock() + _LOOK_EVERY_SEC
            with suppress(OSError):
                file = self._folder / _REQUEST
                is_file = stat.S_ISREG(file.lstat().st_mode)  # a pipe would be waited for
                self._is_made = self._is_made or (is_file and file.read_text() == self._job_id)
        return self._is_made

    def fulfill(self) -> None:
        """Remove the request: the state is saved, and the job ends."""
        if self._folder is not None and self._is_made:
            withdraw_request(self._folder)

    def refuse(self) -> None:
        """Ignore the request from now on: the state could not be saved."""
        self._folder = None
        self._is_made = False
