"""Checks before mpirun starts that each host can be reached and has the program.

If a host does not answer, mpirun waits as long as ssh, possibly minutes, and its message for a
missing command does not say what to do. All hosts are asked at once, with mpirun's own remote
agent.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from kaitian_mpi import __version__
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.limited_process import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    Ended,
    LimitedProcess,
    run_all,
)
from kaitian_mpi.preflight.verdict import Verdict, count_text, ok, problem, problem_from, warning
from kaitian_mpi.runtime.mpi_libraries import (
    AGENT_OPTIONS,
    AGENT_PARAMETERS,
    AGENT_VARIABLES,
    MAPPING_POLICIES,
)
from kaitian_mpi.supervise.environments import Environments, interpreters_of
from kaitian_mpi.supervise.hosts import Host, parse_hostfile
from kaitian_mpi.supervise.mpirun_command import Command, read_hostfile

NO_ANSWER = 255
"""The exit code of ssh if it cannot reach a host."""
SECONDS = 8.0
"""The time limit of the whole check: users are promised an answer within 10 s."""
_SHOW_VERSION = 'from importlib.metadata import version; print(version("kaitian-mpi"))'
_LOGIN = "ssh logs in without a password: ssh -o BatchMode=yes"


class HostAnswer(NamedTuple):
    """A host's answer."""

    version: str
    """This package's version there; empty if unknown."""
    fault: str = ""
    """The reason why ranks cannot be started there, with advice; empty if they can."""


class PendingAnswer:
    """A pending question to a host: the package's version in each of its interpreters."""

    def __init__(
        self,
        agent: Sequence[str],
        host: Host,
        pythons: Sequence[str],
        seconds: float,
        host_is_local: bool = False,
    ) -> None:
        self._asked = []
        for python in pythons:
            command = version_command(agent, host, python, seconds, host_is_local)
            place = (host.name, python, seconds, host_is_local)
            self._asked.append((LimitedProcess(command, seconds), place))

    def poll(self) -> HostAnswer | None:
        """Return the answer, or a fault of any interpreter; None until it arrives. Never blocks."""
        ended = [(process.poll(), place) for process, place in self._asked]
        answers = [read_answer(end, *place) for end, place in ended if end is not None]
        if len(answers) < len(ended):
            return None
        return next((answer for answer in answers if answer.fault), answers[0])

    def cancel(self) -> None:
        """Stop asking."""
        for process, _ in self._asked:
            process.kill()


def version_command(
    agent: Sequence[str], host: Host, python: str, seconds: float, host_is_local: bool
) -> list[str]:
    """Return the command that prints this package's version for an interpreter of a host."""
    words = [python, "-c", _SHOW_VERSION]
    # The remote shell splits the words again.
    return words if host_is_local else probe_command(agent, host, seconds, [shlex.join(words)])


def ask_hosts(
    agent: Sequence[str],
    hosts: Sequence[Host],
    pythons: Mapping[str, Sequence[str]],
    local: Collection[str],
) -> dict[tuple[str, str], HostAnswer]:
    """Ask all hosts for this package's version in each of their interpreters."""
    places = {
        (host.name, python): (host, python, SECONDS, host.name in local)
        for host in hosts
        for python in pythons[host.name]
    }
    commands = {key: version_command(agent, *place) for key, place in places.items()}
    answers = run_all(commands, SECONDS)
    return {key: read_answer(ended, key[0], *places[key][1:]) for key, ended in answers.items()}


def check_hosts(
    agent: Sequence[str], hosts: Sequence[Host], pythons: Mapping[str, Sequence[str]]
) -> None:
    """Ask all hosts as `ask_hosts` does.

    Raises:
        UserError: ranks cannot be started on one of them.
    """
    answers = ask_hosts(agent, hosts, pythons, set(filter(is_local, pythons)))
    if faults := [answer.fault for answer in answers.values() if answer.fault]:
        raise UserError("; ".join(faults))


def read_answer(
    ended: Ended, host: str, python: str, seconds: float, host_is_local: bool
) -> HostAnswer:
    """Return a host's answer, from the exit code and output of its command."""
    last_line = (ended.err.strip().splitlines() or [""])[-1].strip()
    login = f"check that it is up and that {_LOGIN} {host} true"
    version = (ended.out.split() or [""])[-1]  # a login script may print something before it
    fault = ""
    if ended.code is None:
        fault = f"{host} does not answer within {seconds:g} s; {login}"
    elif ended.code == NO_ANSWER and not host_is_local:
        fault = f"{host} cannot be reached ({last_line or 'no message from ssh'}); {login}"
    elif ended.code in (NOT_EXECUTABLE, NOT_FOUND):
        fault = (
            f"{host} has no {python}; install the same environment at that path there, or name "
            "the host's own in a file for kaitian-env (docs/install.md)"
        )
    elif ended.code and "PackageNotFoundError" in ended.err:
        fault = f"{host}: {python} has no kaitian-mpi; install it there with pip"
    elif ended.code:
        fault = f"{host}: {python} fails ({last_line or f'exit code {ended.code}'}); run it there"
    elif version != __version__:
        fault = (
            f"{host} has kaitian-mpi {version}, and this host {__version__}; install the same "
            "version on every host"
        )
    return HostAnswer("" if ended.code else version, fault)


def examine_hosts(
    hostfile: str, environments: Environments, python: str
) -> list[tuple[str, Verdict]]:
    """Check within about 8 s whether mpirun can start ranks on the hosts of a hostfile."""
    hosts = parse_hostfile(read_hostfile(hostfile), hostfile)
    names = [host.name for host in hosts]
    if not hosts:
        raise UserError(f"--hostfile {hostfile} is empty; add a line for each host")
    if unknown := [name for name in environments if name not in names]:
        raise UserError(
            f"--env names {', '.join(unknown)}, but {hostfile} has {', '.join(names)}; make "
            "them agree"
        )
    pythons = {name: interpreters_of(environments, name) or [python] for name in names}
    agent = find_agent(Command(parts=(), arguments=()), os.environ)
    answers = ask_hosts(agent, hosts, pythons, set(filter(is_local, names)))
    verdicts = [("hostfile", verdict) for verdict in check_hostfile(hosts, os.environ)]
    for (name, interpreter), answer in answers.items():
        shown = f"{name}: kaitian-mpi {answer.version}, {interpreter}"
        verdicts.append(("host", problem_from(answer.fault) if answer.fault else ok(shown)))
    return verdicts


def check_hostfile(hosts: tuple[Host, ...], environ: Mapping[str, str]) -> Iterator[Verdict]:
    """Check whether mpirun will place ranks on all of these hosts."""
    for name in MAPPING_POLICIES:
        if "oversubscribe" in environ.get(name, "") and len(hosts) > 1:
            yield problem(
                f"{name}={environ[name]} puts every rank on {hosts[0].name}",
                "unset it: a hostfile with a slot for each rank is enough",
            )
    slots = [host.slots for host in hosts if host.slots is not None]
    if len(slots) == len(hosts):
        yield ok(f"{count_text(len(hosts), 'host')} with {count_text(sum(slots), 'slot')}")
    elif len(hosts) > 1:
        without = ", ".join(host.name for host in hosts if host.slots is None)
        yield warning(
            f"no slots for {without}: mpirun assumes one per core, and may place all ranks on "
            "the first host",
            "write slots=N, one for each device",
        )


def find_agent(command: Command, environ: Mapping[str, str]) -> list[str]:
    """Return the command of the agent that mpirun uses: the first alternative that exists."""
    options = [command.parameter(AGENT_PARAMETERS), *command.values(AGENT_OPTIONS)]
    chosen = next(filter(None, [*options, *map(environ.get, AGENT_VARIABLES)]), "")
    alternatives = [shlex.split(words) for words in chosen.split(":")]
    installed = [words for words in alternatives if words and shutil.which(words[0])]
    return installed[0] if installed else ["ssh"]


def probe_command(
    agent: Sequence[str], host: Host, seconds: float, remote: Sequence[str]
) -> list[str]:
    """Return the command that runs a remote command on a host."""
    words = list(agent)
    if PurePath(agent[0]).name == "ssh":
        # Never prompt: there may be no user to answer.
        words += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={math.ceil(seconds)}"]
        words += ["-p", str(host.port)] if host.port else []
    return [*words, f"{host.user}@{host.name}" if host.user else host.name, *remote]


def is_own_name(name: str) -> bool:
    """Return whether a name is this machine's, without asking a name server."""
    hostname = socket.gethostname()
    return name in ("localhost", hostname, hostname.split(".")[0]) or name.startswith("127.")


def is_local(name: str) -> bool:
    """Return whether a host's name or address is this machine's."""
    if is_own_name(name):
        return True
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in addresses)


def _is_own_address(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # only a machine's own address can be bound
    except OSError:
        return False
    return True
