"""Probes which hosts answer, by the same remote agent that mpirun uses."""

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

from kaitian_mpi.runtime.command import Command
from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.runtime.mpi_libraries import AGENT_OPTIONS, AGENT_PARAMETERS, AGENT_VARIABLES

POLL_SEC = 0.02
"""How often hosts that have been asked are polled."""
_MIN_WAIT_SEC = 2.0
_SLOWEST_FACTOR = 4
NO_ANSWER = 255
"""The exit code of ssh if it cannot reach a host."""
_ANY_PORT = 9  # nothing is sent


def find_agent(command: Command, environ: Mapping[str, str]) -> list[str]:
    """Return the command of the agent that mpirun uses: the first alternative that exists.

    Args:
        command: its options take precedence over the environment, as for mpirun.
        environ: the environment.
    """
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
    """Run a command on all these hosts at once; return its exit codes by host name.

    Args:
        agent: the result of `find_agent`.
        hosts: the hosts.
        words: the command; its words are interpreted by a remote shell.
        seconds: how long an answer may take. Once some hosts have answered, the others get four
            times as long as the slowest of them, at least 2 s.

    Returns:
        `NO_ANSWER` for a host that cannot be reached. Empty if there is no agent: then mpirun
        reaches the hosts in another way.
    """
    if shutil.which(agent[0]) is None:
        return {}
    began = time.monotonic()
    probes = {host.name: _start(probe_command(agent, host, seconds, words)) for host in hosts}
    waited = slowest = 0.0
    waiting = set(probes)
    # Not `polling.wait_until`: the limit changes with each answer.
    while waiting and waited < min(seconds, _max_wait(slowest)):
        time.sleep(POLL_SEC)
        waited = time.monotonic() - began
        for name in [name for name in waiting if probes[name].poll() is not None]:
            waiting.remove(name)
            if probes[name].returncode != NO_ANSWER:
                slowest = waited
    codes = {name: process.poll() for name, process in probes.items()}
    for process in probes.values():
        _end(process)
    return {name: NO_ANSWER if code is None else code for name, code in codes.items()}


def _max_wait(slowest_sec: float) -> float:
    """Return how many seconds to wait in total, given the slowest answer so far."""
    return max(_MIN_WAIT_SEC, _SLOWEST_FACTOR * slowest_sec) if slowest_sec else math.inf


def is_own_name(name: str) -> bool:
    """Return whether a name is this machine's, without asking a name server."""
    own = socket.gethostname()
    return name in ("localhost", own, own.split(".")[0]) or name.startswith("127.")


def is_local(name: str) -> bool:
    """Return whether a host's name or address is this machine's."""
    if is_own_name(name):
        return True
    try:
        found = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: tuple[Any, ...]) -> bool:
    """Return whether the route to an address starts at that address; sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return bool(probe.getsockname()[0] == address[0])
    except OSError:
        return False


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    # In its own session: no terminal to prompt on, and one signal ends all of it.
    return subprocess.Popen(  # noqa: S603 (a list of words; the host name in it is checked)
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
