"""Runs commands on hosts by the same remote agent that mpirun uses, all at once."""

from __future__ import annotations

import math
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

from kaitian_mpi.preflight.process import LimitedProcess
from kaitian_mpi.runtime.command import Command
from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.runtime.mpi_libraries import AGENT_OPTIONS, AGENT_PARAMETERS, AGENT_VARIABLES

NO_ANSWER = 255
"""The exit code of ssh if it cannot reach a host."""
MAX_AT_ONCE = 256


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


def lost_hosts(agent: Sequence[str], hosts: Sequence[Host], seconds: float) -> frozenset[str]:
    """Return the names of the hosts that `run_on` cannot reach."""
    return frozenset(name for name, code in run_on(agent, hosts, ["true"], seconds).items() if code)


def run_on(
    agent: Sequence[str], hosts: Sequence[Host], words: Sequence[str], seconds: float
) -> dict[str, int]:
    """Run a command on all these hosts; return its exit codes by host name.

    Args:
        agent: the result of `find_agent`.
        hosts: the hosts.
        words: the command; its words are interpreted by a remote shell.
        seconds: how long an answer may take.

    Returns:
        `NO_ANSWER` for a host that cannot be reached. Empty if there is no agent: then mpirun
        reaches the hosts in another way.
    """
    if not hosts or shutil.which(agent[0]) is None:
        return {}

    def run(host: Host) -> int:
        code = LimitedProcess(probe_command(agent, host, seconds, words), seconds).wait().code
        return NO_ANSWER if code is None else code

    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return dict(zip([host.name for host in hosts], pool.map(run, hosts), strict=True))


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
