"""Runs commands on hosts by the same remote agent that mpirun uses, all at once."""

from __future__ import annotations

import math
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from kaitian_mpi.preflight.process import LimitedProcess
from kaitian_mpi.runtime.command import Command
from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.runtime.mpi_libraries import AGENT_OPTIONS, AGENT_PARAMETERS, AGENT_VARIABLES

NO_ANSWER = 255
"""The exit code of ssh if it cannot reach a host."""


def find_agent(command: Command, environ: Mapping[str, str]) -> list[str]:
    """Return the command of the agent that mpirun uses: the first alternative that exists."""
    options = [command.parameter(AGENT_PARAMETERS), *command.values(AGENT_OPTIONS)]
    chosen = next(filter(None, [*options, *map(environ.get, AGENT_VARIABLES)]), "")
    alternatives = [shlex.split(words) for words in chosen.split(":")]
    installed = [words for words in alternatives if words and shutil.which(words[0])]
    return installed[0] if installed else ["ssh"]


def probe_command(
    agent: Sequence[str], host: Host, seconds: float, remote: Sequence[str] = ("true",)
) -> list[str]:
    """Return the command that runs a remote command on a host, by default `true`."""
    words = list(agent)
    if PurePath(agent[0]).name == "ssh":
        # Never prompt: there may be no user to answer.
        words += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={math.ceil(seconds)}"]
        words += ["-p", str(host.port)] if host.port else []
    return [*words, f"{host.user}@{host.name}" if host.user else host.name, *remote]


def run_on(
    agent: Sequence[str], hosts: Sequence[Host], words: Sequence[str], seconds: float
) -> dict[str, int]:
    """Run a command, whose words a remote shell interprets, on all these hosts at once.

    Returns:
        Its exit code by host name, `NO_ANSWER` for a host that cannot be reached in time. Empty if
        there is no agent: then mpirun reaches the hosts in another way.
    """
    if not hosts or shutil.which(agent[0]) is None:
        return {}
    running = {
        host.name: LimitedProcess(probe_command(agent, host, seconds, words), seconds)
        for host in hosts
    }
    codes = {name: process.wait().code for name, process in running.items()}
    return {name: NO_ANSWER if code is None else code for name, code in codes.items()}


def is_own_name(name: str) -> bool:
    """Return whether a name is this machine's, without asking a name server."""
    own = socket.gethostname()
    return name in ("localhost", own, own.split(".")[0]) or name.startswith("127.")


def is_local(name: str) -> bool:
    """Return whether a host's name or address is this machine's."""
    if is_own_name(name):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # only a machine's own address can be bound
    except OSError:
        return False
    return True
