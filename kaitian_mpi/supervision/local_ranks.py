"""Whether a launcher has ranks on this machine, from /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
# Open MPI's and MPICH's name for a rank's number: only their ranks have it.
_MARKS = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")


def has_local_ranks(launcher: int) -> bool:
    """Return whether a process has a rank below it; False where that cannot be seen.

    Args:
        launcher: the process's id.
    """
    return any(_is_rank(process) for process in _descendants(launcher))


def _descendants(process: int) -> Iterator[int]:
    try:
        # A child belongs to the thread that has started it.
        lists = [file.read_text() for file in (_PROC / str(process)).glob("task/*/children")]
    except OSError:  # it has just ended
        return
    for child in map(int, " ".join(lists).split()):
        yield child
        yield from _descendants(child)


def _is_rank(process: int) -> bool:
    """Return whether a process is a rank, or of a rank; one that has ended is none."""
    try:
        variables = (_PROC / str(process) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(_MARKS) for variable in variables)
