"""Which hosts answer: asked through the agent by which mpirun reaches them."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from kaitian_mpi.supervision.command import Command
from kaitian_mpi.supervision.hosts import Host

_PARAMETERS = ("plm_ssh_agent", "plm_rsh_agent")  # the second one is Open MPI 4's
_PREFIXES = ("PRTE_MCA_", "OMPI_MCA_")
_POLL_SEC = 0.02
_LEAST_PATIENCE_SEC = 2.0
_TIMES_SLOWEST = 4
NO_ANSWER = 255
"""What ssh ends with when it cannot reach a host."""
_ANY_PORT = 9  # nothing is sent


def find_agent(command: Command, environ: Mapping[str, str]) -> list[str]:
    """Return the words of the agent that mpirun logs in with: the first alternative there is.

    Args:
        command: its MCA parameters go before the environment's, as for mpirun.
        environ: the environment.
    """
    variables = [prefix + name for prefix in _PREFIXES for name in _PARAMETERS]
    chosen = command.parameter(_PARAMETERS) or next(filter(None, map(environ.get, variables)), "")
    alternatives = [shlex.split(words) for words in chosen.split(":")]
    there = [words for words in alternatives if words and shutil.which(words[0])]
    return there[0] if there else ["ssh"]


def probe_command(
    agent: Sequence[str], host: Host, seconds: float, asked: Sequence[str] = ("true",)
) -> list[str]:
    """Return the words that run a command on a host, `true` by default."""
    words = list(agent)
    if PurePath(agent[0]).name == "ssh":
        # Never prompt: nobody may be there to answer.
        words += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={math.ceil(seconds)}"]
        words += ["-p", str(host.port)] if host.port else []
    return [*words, f"{host.user}@{host.name}" if host.user else host.name, *asked]


def lost_hosts(agent: Sequence[str], hosts: Sequence[Host], seconds: float) -> frozenset[str]:
    """Return the names of the hosts that do not answer, as `run_on` finds out."""
    return frozenset(name for name, code in run_on(agent, hosts, ["true"], seconds).items() if code)


def run_on(
    agent: Sequence[str], hosts: Sequence[Host], words: Sequence[str], seconds: float
) -> dict[str, int]:
    """Run a command on hosts, on all at once, and return its exit codes by the hosts' names.

    Args:
        agent: as `find_agent`.
        hosts: where.
        words: the command, of words that a remote shell may read.
        seconds: how long an answer may take. Once others have answered, four times as long as the
            slowest of them is enough, if that is more than 2 s.

    Returns:
        `NO_ANSWER` for a host that cannot be reached. Nothing at all where there is no agent: then
        mpirun has other ways, and nobody can be asked.
    """
    if shutil.which(agent[0]) is None:
        return {}
    began = time.monotonic()
    asked = {host.name: _ask(probe_command(agent, host, seconds, words)) for host in hosts}
    waited = slowest = 0.0
    waiting = set(asked)
    while waiting and waited < min(seconds, _patience(slowest)):
        time.sleep(_POLL_SEC)
        waited = time.monotonic() - began
        for name in [name for name in waiting if asked[name].poll() is not None]:
            waiting.remove(name)
            if asked[name].returncode != NO_ANSWER:
                slowest = waited
    codes = {name: process.poll() for name, process in asked.items()}
    for process in asked.values():
        _end(process)
    return {name: NO_ANSWER if code is None else code for name, code in codes.items()}


def _patience(slowest_sec: float) -> float:
    """Return how many seconds to wait for those that have not answered, by those that have."""
    return max(_LEAST_PATIENCE_SEC, _TIMES_SLOWEST * slowest_sec) if slowest_sec else math.inf


def is_local(name: str) -> bool:
    """Return whether a host's name or address is this machine's."""
    own = socket.gethostname()
    if name in ("localhost", own, own.split(".")[0]) or name.startswith("127."):
        return True
    try:
        found = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: tuple[Any, ...]) -> bool:
    """Return whether the route to an address begins at that address; sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return bool(probe.getsockname()[0] == address[0])
    except OSError:
        return False


def _ask(words: Sequence[str]) -> subprocess.Popen[bytes]:
    # A session of its own: no terminal to ask for a password on, and one signal ends all of it.
    return subprocess.Popen(  # noqa: S603 (a list of words, the host's name among them checked)
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
