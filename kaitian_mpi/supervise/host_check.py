"""Asks each host, before mpirun does, whether it can be reached and has what is to be started.

mpirun waits as long as ssh does if a host does not answer, which may be minutes, and its message
for a missing command does not say what to do. All hosts are asked at once.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO, NamedTuple

from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.supervise.probe import NO_ANSWER, POLL_SEC, probe_command

SECONDS = 8.0
"""How long all of it may take: users are promised an answer within 10 s."""
_MAX_AT_ONCE = 256
_MAX_ANSWER_BYTES = 1 << 16
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit codes of a shell
_SHOW_VERSION = 'from importlib.metadata import version; print(version("kaitian-mpi"))'
_LOGIN = "ssh logs in without a password: ssh -o BatchMode=yes"


class HostAnswer(NamedTuple):
    """What a host has answered."""

    version: str
    """This package's version there; empty if unknown."""
    fault: str = ""
    """Why ranks cannot be started there, and what to do; empty if they can."""


class Ended(NamedTuple):
    """How the question to a host has ended."""

    code: int | None
    """The exit code; None if it took too long."""
    out: str = ""
    err: str = ""


class PendingAnswer:
    """A host that has been asked for this package's version; nothing here blocks."""

    def __init__(
        self, agent: Sequence[str], host: Host, python: str, seconds: float, is_local: bool = False
    ) -> None:
        """Ask.

        Args:
            agent: the command by which mpirun reaches hosts, as `find_agent` returns it.
            host: the host.
            python: the path of its interpreter.
            seconds: how long it may take.
            is_local: whether it is this machine, which is asked without the agent.
        """
        self._host, self._python, self._seconds, self._is_local = host, python, seconds, is_local
        self._until = time.monotonic() + seconds
        self._answer: HostAnswer | None = None
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        words = [python, "-c", _SHOW_VERSION]
        if not is_local:  # the remote shell splits the words again
            words = probe_command(agent, host, seconds, [shlex.join(words)])
        try:
            # In its own session: no terminal to prompt on, and one signal ends all of it.
            self._process = subprocess.Popen(  # noqa: S603 (a list of words with a checked name)
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            self._finish(Ended(_NOT_FOUND if is_missing else _NOT_EXECUTABLE))

    def poll(self) -> HostAnswer | None:
        """Return the answer; None until there is one, at most for the seconds given."""
        if self._answer is None:
            code = self._process.poll()
            if code is not None or time.monotonic() > self._until:
                self._finish(None if code is None else Ended(code, *self._output()))
        return self._answer

    def cancel(self) -> None:
        """Stop asking."""
        if self._answer is None:
            self._finish(None)

    def _output(self) -> tuple[str, str]:
        return _content(self._out), _content(self._err)

    def _finish(self, ended: Ended | None) -> None:
        if ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._out.close()
        self._err.close()
        place = (self._host.name, self._python, self._seconds, self._is_local)
        self._answer = judge(ended or Ended(None), *place)


def ask_hosts(
    agent: Sequence[str],
    hosts: Sequence[Host],
    pythons: Mapping[str, str],
    local: Collection[str],
    seconds: float = SECONDS,
) -> dict[str, HostAnswer]:
    """Ask all hosts whether they answer, and have this package for their interpreter.

    Args:
        agent: as for `PendingAnswer`.
        hosts: the hosts.
        pythons: the path of each host's interpreter.
        local: the names of this machine, which is asked without the agent.
        seconds: how long each may take.
    """
    answers: dict[str, HostAnswer] = {}
    for begin in range(0, len(hosts), _MAX_AT_ONCE):
        asked = {
            host.name: PendingAnswer(
                agent, host, pythons[host.name], seconds, is_local=host.name in local
            )
            for host in hosts[begin : begin + _MAX_AT_ONCE]
        }
        while any(each.poll() is None for each in asked.values()):
            time.sleep(POLL_SEC)
        answers |= {name: each.poll() or HostAnswer("") for name, each in asked.items()}
    return answers


def judge(ended: Ended, host: str, python: str, seconds: float, is_local: bool) -> HostAnswer:
    """Return what the end of a host's command means."""
    said = (ended.err.strip().splitlines() or [""])[-1].strip()
    login = f"check that it is up and that {_LOGIN} {host} true"
    fault = ""
    if ended.code is None:
        fault = f"{host} does not answer within {seconds:g} s; {login}"
    elif ended.code == NO_ANSWER and not is_local:
        fault = f"{host} cannot be reached ({said or 'ssh says nothing'}); {login}"
    elif ended.code in (_NOT_EXECUTABLE, _NOT_FOUND):
        fault = (
            f"{host} has no {python}; install the same environment at that path there, or name "
            "the host's own in a file for kaitian-env (docs/install.md)"
        )
    elif ended.code and "PackageNotFoundError" in ended.err:
        fault = f"{host}: {python} has no kaitian-mpi; install it there with pip"
    elif ended.code:
        fault = f"{host}: {python} fails ({said or f'exit code {ended.code}'}); run it there"
    lines = ended.out.split()  # a login script may print something before it
    return HostAnswer("", fault) if fault else HostAnswer(lines[-1] if lines else "")


def version_faults(answers: Mapping[str, HostAnswer], own: str) -> list[str]:
    """Return a line for each host with another version of this package than this one's."""
    return [
        f"{host} has kaitian-mpi {answer.version}, and this host {own}; install the same version "
        "on every host"
        for host, answer in answers.items()
        if not answer.fault and answer.version != own
    ]


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_ANSWER_BYTES).decode(errors="replace")
