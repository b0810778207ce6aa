"""Folders for a single job: the run folder, with requests to the job, and the folder of snapshots.

Snapshots are in the host's memory and survive between starts of a job. `/dev/shm` is shared with
the host's other users, and training resumes from a snapshot without confirmation, so a folder that
is accessible to others is rejected.
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
"""The variable with the snapshots' name, which is secret: other users can read flags."""
SHM = Path("/dev/shm")  # noqa: S108  # every use is checked by `is_private`
_PRIVATE = 0o700
_REQUEST = "restart-request"  # a file with the job's ID, which only its supervisor knows
_CHECK_EVERY_SEC = 0.5


def snapshots_name(given: str, environ: Mapping[str, str]) -> str:
    """Return the given name of snapshots, or that of kaitian-supervise; empty without snapshots."""
    name = given or environ.get(SNAPSHOTS_VARIABLE, "")
    if name and not (name.isascii() and name.isalnum()):
        raise UserError(f"{SNAPSHOTS_VARIABLE}={name!r} is not a name; use letters and digits only")
    return name


def snapshot_folder(name: str) -> Path:
    """Return this host's folder for snapshots of this name, which need not exist."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return SHM / f"kaitian-{name}-{host}"


def snapshot_folder_by_shell(name: str) -> str:
    """Return what a shell on any host expands to the path of that host's `snapshot_folder`."""
    return f"{SHM}/kaitian-{name}-$(hostname | tr -c 'A-Za-z0-9.\\n-' -)"


def is_private(folder: Path) -> bool:
    """Return whether a folder exists and is accessible to this user only.

    Raises:
        UserError: it exists, but others can access it.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; give --snapshots another name") from error
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if is_own and stat.S_IMODE(status.st_mode) == _PRIVATE:
        return True
    raise UserError(
        f"{folder} is not used: it is not a folder of mode 700 that belongs to you; "
        "remove it, or give --snapshots another name"
    )


def make_private(folder: Path) -> None:
    """Create a folder that only this user can access, unless it exists.

    Raises:
        UserError: it exists and is not accessible to this user only.
        OSError: it cannot be created.
    """
    with suppress(FileExistsError):  # another rank of this job may have created it
        folder.mkdir(mode=_PRIVATE)
    is_private(folder)


def remove_private(folder: Path) -> None:
    """Remove a folder and its content, if only this user can access it; never raises."""
    with suppress(UserError):  # it belongs to another user, who has to remove it
        if is_private(folder):
            shutil.rmtree(folder, ignore_errors=True)


def make_new_folder(wanted: Path) -> Path:
    """Create a new folder and return it: `wanted` if it is free, otherwise `wanted-2` and so on.

    Jobs that want the same name at the same moment each get their own folder.
    """
    path = wanted
    number = 1
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
    """Ask a job to save and end between two steps.

    Raises:
        OSError: the request cannot be written.
    """
    with replacing(folder / _REQUEST) as file:
        file.write(job_id.encode())


def withdraw_request(folder: Path) -> bool:
    """Remove a request; return whether there was one that the job had not fulfilled."""
    try:
        (folder / _REQUEST).unlink()
    except OSError:
        return False
    return True


class RestartRequest:
    """A request to save and end, as seen by the rank that writes the run folder."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._job_id = os.environ.get(SUPERVISED, "")
        self._next = 0.0
        self._is_made = False

    def is_made(self) -> bool:
        """Return whether the request was made; checks for its file every half second."""
        if self._folder is not None and self._job_id and self._clock() >= self._next:
            self._next = self._clock() + _CHECK_EVERY_SEC
            with suppress(OSError):
                file = self._folder / _REQUEST
                is_file = stat.S_ISREG(file.lstat().st_mode)  # reading a pipe would block
                self._is_made = self._is_made or (is_file and file.read_text() == self._job_id)
        return self._is_made

    def fulfill(self) -> None:
        """Remove the request, because the state is saved and the job ends."""
        if self._folder is not None and self._is_made:
            withdraw_request(self._folder)

    def refuse(self) -> None:
        """Ignore the request from now on, because the state could not be saved."""
        self._folder = None
        self._is_made = False
