"""Folders that belong to one job alone: a run's default one, and the one for snapshots.

The latter is in the host's memory and holds a job's snapshots from one start to the next.
`/dev/shm` is shared with the host's other users, and a snapshot is trained from without being
asked for. So the folder belongs to this user alone, and one that does not is refused.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from kaitian_mpi.errors import UserError

VARIABLE = "OMPI_KAITIAN_SNAPSHOTS"
"""Holds the name where it is a secret, unlike a flag. Open MPI hands OMPI_* to all hosts."""
MEMORY = Path("/dev/shm")  # noqa: S108  # every use is checked, see `is_private`
_PRIVATE = 0o700


def snapshots_name(given: str, environ: Mapping[str, str]) -> str:
    """Return under which name snapshots are kept; empty where none are.

    Args:
        given: the value of `--snapshots`.
        environ: the environment, in which kaitian-supervise gives a name of its own.

    Raises:
        UserError: the environment's is no name.
    """
    name = given or environ.get(VARIABLE, "")
    if name and not (name.isascii() and name.isalnum()):
        raise UserError(f"{VARIABLE}: found {name!r}, needed a name of letters and digits")
    return name


def snapshot_folder(name: str) -> Path:
    """Return this host's folder for the snapshots of this name; it need not be there."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return MEMORY / f"kaitian-{name}-{host}"


def is_private(folder: Path) -> bool:
    """Return whether a folder is there, and is this user's alone.

    Raises:
        UserError: it is there, and another user owns it, may look into it, or it is no folder.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; give --snapshots another name") from error
    if not stat.S_ISDIR(found.st_mode):
        fault = "something that is no folder"
    elif found.st_uid != os.geteuid():
        fault = f"a folder of another user (uid {found.st_uid})"
    elif stat.S_IMODE(found.st_mode) != _PRIVATE:
        fault = f"a folder of mode {stat.S_IMODE(found.st_mode):03o}"
    else:
        return True
    raise UserError(
        f"{folder}: found {fault}, needed one that only this user can enter (mode 700); nothing "
        "is read from it; remove it, or give --snapshots another name"
    )


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, unless it is there.

    Raises:
        UserError: what is there is not this user's alone.
        OSError: it cannot be made.
    """
    if is_private(folder):
        return
    try:
        folder.mkdir(mode=_PRIVATE)
    except FileExistsError:  # somebody has been quicker: perhaps another rank of ours
        if not is_private(folder):
            raise


def remove_private(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is this user's alone; never raises."""
    try:
        if is_private(folder):
            shutil.rmtree(folder, ignore_errors=True)
    except UserError:  # another user's, who has to remove it
        return


def make_new_folder(wanted: Path) -> Path:
    """Make a folder that is not there yet, and return it: `wanted`, or `wanted-2`, `wanted-3` ...

    Of several jobs that want the same name at the same moment each gets its own: a folder is made
    by one of them only.

    Raises:
        UserError: it cannot be made.
    """
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise UserError(
            f"{wanted}: {error.strerror}; name a folder that can be written by --run-dir"
        ) from error
    raise AssertionError("unreachable")
