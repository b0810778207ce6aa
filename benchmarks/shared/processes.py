"""What Linux tells about the processes of a job."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from kaitian_mpi.runtime.mpi_libraries import LIBRARIES
from kaitian_mpi.runtime.start_watch_process import rank_behind

_NAMES = b"|".join(library.rank_variables[0].encode() for library in LIBRARIES)
_RANK = re.compile(rb"(?:^|\0)(?:" + _NAMES + rb")=(\d+)\0")


def rank_of(pid: int) -> int | None:
    """Return the world rank that a process is, or belongs to; None where there is none."""
    try:
        found = _RANK.search(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:  # it has ended
        return None
    return int(found[1]) if found else None


def processes_of(rank: int) -> list[psutil.Process]:
    """Return a rank and all that it has started."""
    found, left = [], [rank]
    while left:
        process = psutil.Process(rank_behind(left.pop()))
        found.append(process)
        left += [child.pid for child in process.children()]
    return found


def parent_of(pid: int) -> int | None:
    """Return a process's parent; None where it has ended."""
    try:
        # The program's name, in brackets, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def assert_gone(pids: Iterable[int], limit_sec: float) -> None:
    """Check that these processes end within a time."""
    ends_at = time.monotonic() + limit_sec
    left = [pid for pid in pids if parent_of(pid) is not None]
    while left and time.monotonic() < ends_at:
        time.sleep(0.05)
        left = [pid for pid in left if parent_of(pid) is not None]
    assert not left
