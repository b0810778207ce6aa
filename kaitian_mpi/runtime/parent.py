"""Reads the command line of the launcher of this process."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.allocation import read_hosts
from kaitian_mpi.runtime.command import HOSTFILES, Command, parse_launcher
from kaitian_mpi.runtime.hosts import Host

_PLACEMENT = ("map-by", "ppr", "npernode", "N", "rankfile", "rf")


def launcher_command(pid: int) -> Command | None:
    """Return the command line of mpirun; None if the process is another program.

    Hostfiles have their full paths in it.

    Args:
        pid: the process; it must be this user's.
    """
    try:
        process = psutil.Process(pid)
        words, folder = process.cmdline(), process.cwd()
    except psutil.Error:
        return None
    command = parse_launcher(words)
    # As the first word: a shell or a batch script may contain such a word as well.
    if not (command.parts and command.parts[0].is_launcher):
        return None
    paths = [os.path.join(folder, path) for path in command.values(HOSTFILES)]
    return command.replaced(HOSTFILES, paths)


def hosts_of_launcher(pid: int) -> tuple[Host, ...]:
    """Return the hosts that mpirun was given by files or lists; empty if none, or unknown."""
    command = launcher_command(pid)
    # Several programs have their own hosts each, and these options are the user's own choice.
    if command is None or ":" in command.arguments or command.values(_PLACEMENT):
        return ()
    with suppress(UserError):
        return read_hosts(command)[0]
    return ()
