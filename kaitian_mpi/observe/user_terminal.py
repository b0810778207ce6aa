"""Finds the user's terminal, which is the launcher's and not the rank's own.

A rank's stdout says nothing about it: Open MPI gives every rank a pseudo terminal, even if mpirun's
output goes to a file, and MPICH gives it a pipe, even if the user is at a terminal. So rank 0 asks
the kernel where the launcher's stdout goes, if the launcher is on its host.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping

from kaitian_mpi.runtime.launcher import SUPERVISED, read_tasks
from kaitian_mpi.runtime.mpi_libraries import launched_by
from kaitian_mpi.runtime.parent import launcher_command

MIN_COLUMNS, MIN_ROWS = 32, 10
_NOT_A_USER = {
    "JPY_PARENT_PID": "a notebook",  # its pseudo terminal cannot move the cursor
    "CI": "a CI job",
}


class NoTerminalError(Exception):
    """There is no terminal to draw on; the message says why."""


def find_terminal(environ: Mapping[str, str], *, forced: bool = False) -> int:
    """Return the pid of the process whose stdout is the user's terminal.

    Args:
        environ: the environment of this rank.
        forced: whether the user asked for a live view; then a notebook or a CI job gets one, too.

    Raises:
        NoTerminalError: there is no terminal, or it cannot be drawn on.
    """
    if environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        raise NoTerminalError("TERM is unset or names a terminal that cannot move its cursor")
    for name, what in _NOT_A_USER.items():
        if environ.get(name) and not forced:
            raise NoTerminalError(f"{name} is set: this is {what}")
    owner = _owner_of_terminal(environ)
    if not forced and not is_in_foreground(owner):
        raise NoTerminalError("the job is in the background")
    return owner


def open_terminal(owner: int) -> int:
    """Return a new file descriptor for the terminal that is a process's stdout.

    Args:
        owner: the pid of the process.

    Raises:
        NoTerminalError: its stdout is not a terminal, or cannot be opened.
    """
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(f"/proc/{owner}/fd/1", flags)
    except OSError as error:
        raise NoTerminalError(f"the terminal cannot be opened: {error.strerror}") from error
    if not os.isatty(descriptor):
        os.close(descriptor)
        raise NoTerminalError("the output goes to a file or a pipe")
    return descriptor


def is_in_foreground(owner: int) -> bool:
    """Return whether a process belongs to its terminal's foreground job.

    kaitian-supervise starts mpirun in a process group of its own; then the supervisor's counts.
    """
    parent, group, foreground = _stat(owner)
    if group != foreground and SUPERVISED in os.environ:
        _, group, foreground = _stat(parent)
    return 0 < foreground == group


def can_draw_unicode(environ: Mapping[str, str]) -> bool:
    """Return whether the locale's encoding has the characters of bars and lines."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    return encoding.lower().startswith("utf") and environ.get("LC_ALL") not in ("C", "POSIX")


def _owner_of_terminal(environ: Mapping[str, str]) -> int:
    """Return the launcher's pid, or this process's own if there is none.

    Raises:
        NoTerminalError: the launcher is on another host, or the output is redirected.
    """
    library = launched_by(environ)
    if library is None and read_tasks(environ) is None:
        return os.getpid()
    kind = os.fstat(1).st_mode
    if not (os.isatty(1) or stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        raise NoTerminalError("the output of rank 0 goes to a file")
    pid = os.getppid()
    while library is not None and _name(parent := _stat(pid)[0]) in library.processes:
        pid = parent  # pid was a daemon of the library; its parent may be mpirun
    if launcher_command(pid) is None:
        raise NoTerminalError("mpirun is not on this host")
    return pid


def _stat(pid: int) -> tuple[int, int, int]:
    """Return a process's parent, its group, and its terminal's foreground group."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, 0, 0
    return int(fields[1]), int(fields[2]), int(fields[5])


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""
