"""Reads from files which hosts a command gives mpirun."""

from __future__ import annotations

import os
from pathlib import Path

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.command import HOST_LISTS, HOSTFILES, Command
from kaitian_mpi.runtime.hosts import Host, choose, parse_host_list, parse_hostfile


def read_hosts(command: Command) -> tuple[tuple[Host, ...], dict[str, str]]:
    """Return the hosts of a command, and the content of each of its hostfiles by path.

    Raises:
        UserError: a hostfile cannot be read, or a line of it is no host.
    """
    hostfiles = {path: read_hostfile(path) for path in command.values(HOSTFILES)}
    from_files = parse_hostfile("\n".join(hostfiles.values()), ", ".join(hostfiles))
    lists = ",".join(command.values(HOST_LISTS))
    return choose(from_files, parse_host_list(lists) if lists else ()), hostfiles


def read_hostfile(path: str) -> str:
    """Return a hostfile's content.

    Raises:
        UserError: it cannot be read.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file; name a hostfile that is one")
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); correct it or name another hostfile"
        ) from error
