"""Making the folder of a run that nobody has named, for one job alone."""

from __future__ import annotations

import itertools
from pathlib import Path

from kaitian_mpi.errors import UserError


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
