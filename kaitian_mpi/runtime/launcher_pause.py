"""Pauses the launcher while a rank saves its state; otherwise the launcher would kill the rank.

Open MPI's mpirun gives its ranks 0.25 s between SIGTERM and SIGKILL, with no option to extend it.
When mpirun exits, a batch system considers the job finished and kills its remaining processes. So
mpirun, or its daemon on this host, is stopped by SIGSTOP and resumed once the state is saved.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.runtime.mpi_libraries import Library, launched_by

_LIMIT_SEC = 300.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pause_launcher(*, even_if_visible: bool = False) -> int:
    """Stop this rank's launcher until the returned file descriptor is closed.

    A helper process resumes it then, or when this process ends, or after 5 minutes at the latest.

    Args:
        even_if_visible: whether to stop it even if an interactive shell waits for it and would show
            it as suspended by Ctrl-Z.

    Returns:
        A file descriptor; -1 if the launcher was not stopped: there is none, it is unknown, or a
        shell would show it as suspended.
    """
    launcher = os.getppid()
    library = launched_by(os.environ)
    if library is None or not _may_stop(library, launcher, even_if_visible):
        return -1
    reader, writer = os.pipe()
    try:
        os.kill(launcher, signal.SIGSTOP)
        child = os.fork()
    except OSError:
        with suppress(OSError):
            os.kill(launcher, signal.SIGCONT)
        os.close(reader)
        os.close(writer)
        return -1
    if child == 0:
        _resume_later(launcher, reader)
    os.close(reader)
    return writer


def _resume_later(launcher: int, reader: int) -> None:
    """Resume the launcher when the pipe is closed, then exit. Runs in the forked child."""
    try:
        detach_from_job(keep=reader)
        select.select([reader], [], [], _LIMIT_SEC)
    finally:
        with suppress(OSError):
            os.kill(launcher, signal.SIGCONT)
        os._exit(0)


def detach_from_job(keep: int = -1) -> None:
    """Detach this forked child from the job: a new session, and none of the rank's descriptors.

    mpirun sends its signals to the rank's process group; and the other ranks and the watchdog
    notice the rank's end by its connections being closed.

    Args:
        keep: a descriptor to keep open besides stdin, stdout and stderr.
    """
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2 and descriptor != keep:
            with suppress(OSError):
                os.close(descriptor)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("kaitian-save")


def _may_stop(library: Library, launcher: int, even_if_visible: bool) -> bool:
    """Return whether the launcher is to be stopped, and no shell would show it as suspended.

    A shell with job control gives each command its own process group. So does the supervisor, but
    it only waits for the launcher to exit.
    """
    with suppress(OSError, ValueError):
        name, parent, group, terminal = _describe(launcher)
        if not library.kills_soon or name not in library.processes:
            return False
        if even_if_visible or SUPERVISED in os.environ:
            return True
        return terminal == 0 or parent <= 1 or _describe(parent)[2] == group
    return False


def _describe(pid: int) -> tuple[str, int, int, int]:
    """Return a process's name, parent, process group and terminal; 0 for no terminal."""
    head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    _, parent, group, _, terminal, *_ = tail.split()
    return head.partition("(")[2], int(parent), int(group), int(terminal)
