"""Finds out from /proc whether a launcher has ranks on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kaitian_mpi.runtime.mpi_libraries import LIBRARIES

_PROC = Path("/proc")
# Only ranks have these.
_RANK_VARIABLES = tuple(f"{library.rank_variables[0]}=".encode() for library in LIBRARIES)


def has_local_ranks(launcher: int) -> bool:
    """Return whether a process has a rank among its descendants; False if that is not visible.

    Args:
        launcher: the process id.
    """
    return any(_is_rank(process) for process in _descendants(launcher))


def _descendants(process: int) -> Iterator[int]:
    try:
        # /proc lists a child under the thread that started it.
        lists = [file.read_text() for file in (_PROC / str(process)).glob("task/*/children")]
    except OSError:  # it has just exited
        return
    for child in map(int, " ".join(lists).split()):
        yield child
        yield from _descendants(child)


def _is_rank(process: int) -> bool:
    """Return whether a process is a rank or a rank's child; False if it has exited."""
    try:
        variables = (_PROC / str(process) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(_RANK_VARIABLES) for variable in variables)
