"""Holding the launcher up while a rank saves its state: it would end the rank, and then the job.

Open MPI's mpirun gives its ranks 0.25 s between SIGTERM and SIGKILL, and no option for more. After
it, a batch system takes the job for over and ends what is left of it. So mpirun, or its daemon on
this host, is stopped by SIGSTOP and continued as soon as the state is saved.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.runtime.launcher import SUPERVISED

_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted")
_LIMIT_SEC = 300.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pause_launcher(*, even_if_shown: bool = False) -> int:
    """Stop this rank's launcher until the descriptor that is returned is closed.

    A small process continues it then, when this one has ended, and after 5 minutes at the latest.

    Args:
        even_if_shown: whether to stop it also where an interactive shell waits for it, which takes
            it for suspended by Ctrl-Z.

    Returns:
        A descriptor; -1 where the launcher is not stopped: there is none, it is an unknown one, or
        a shell would show it.
    """
    launcher = os.getppid()
    if "OMPI_COMM_WORLD_RANK" not in os.environ or not _may_stop(launcher, even_if_shown):
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
        _continue_later(launcher, reader)
    os.close(reader)
    return writer


def _continue_later(launcher: int, reader: int) -> None:
    """Continue the launcher at the pipe's end; for the forked child, which ends here."""
    try:
        leave_job(keep=reader)
        select.select([reader], [], [], _LIMIT_SEC)
    finally:
        with suppress(OSError):
            os.kill(launcher, signal.SIGCONT)
        os._exit(0)


def leave_job(keep: int = -1) -> None:
    """Make this forked child a process of its own, which holds nothing of the rank's.

    mpirun's signals go to the rank's process group; and by the end of the rank's connections the
    other ranks and the watchdog learn of its end.

    Args:
        keep: a descriptor that stays open, beside the first three.
    """
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != keep:
            with suppress(OSError):
                os.close(descriptor)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("kaitian-save")


def _may_stop(launcher: int, even_if_shown: bool) -> bool:
    """Return whether a launcher is known, and no shell would show that it is stopped.

    A shell with job control gives each command a process group of its own; so does the supervisor,
    which only waits for its end.
    """
    with suppress(OSError, ValueError):
        name, parent, group, terminal = _describe(launcher)
        if name not in _LAUNCHERS:
            return False
        if even_if_shown or SUPERVISED in os.environ:
            return True
        return terminal == 0 or parent <= 1 or _describe(parent)[2] == group
    return False


def _describe(process: int) -> tuple[str, int, int, int]:
    """Return a process's name, parent, process group and terminal; 0 for no terminal."""
    head, _, tail = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")
    _, parent, group, _, terminal, *_ = tail.split()
    return head.partition("(")[2], int(parent), int(group), int(terminal)
