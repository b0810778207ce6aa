"""Asks each host, before mpirun does, whether it can be reached and has what is to be started.

mpirun waits as long as ssh does where a host does not answer, which may be minutes, and its message
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.supervise.probe import NO_ANSWER, probe_command

SECONDS = 8.0
"""How long all of it may take: users are promised an answer within 10 s."""
_MAX_AT_ONCE = 256
_MAX_ANSWER_BYTES = 1 << 16
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit codes of a shell
_SHOW_VERSION = 'from importlib.metadata import version; print(version("kaitian-mpi"))'


@dataclass(frozen=True)
class HostAnswer:
    """What a host has answered."""

    version: str
    """This package's version there; empty if unknown."""
    fault: str = ""
    """Why ranks cannot be started there, and what to do; empty if they can."""


@dataclass(frozen=True)
class _Ended:
    code: int | None
    """None if it took too long."""
    out: str = ""
    err: str = ""


def ask_hosts(
    agent: Sequence[str],
    hosts: Sequence[Host],
    pythons: Mapping[str, str],
    local: Collection[str],
    seconds: float = SECONDS,
) -> dict[str, HostAnswer]:
    """Ask all hosts whether they answer, and have this package for their interpreter.

    Args:
        agent: the command that mpirun reaches hosts by, as `find_agent` returns it.
        hosts: the hosts.
        pythons: the path of each host's interpreter.
        local: the names of this machine, which is asked without the agent.
        seconds: how long each may take.
    """

    def ask(host: Host) -> HostAnswer:
        python, is_local = pythons[host.name], host.name in local
        words = _question(agent, host, python, seconds, is_local)
        return judge(_run(words, seconds), host.name, python, seconds, is_local)

    with ThreadPoolExecutor(min(_MAX_AT_ONCE, max(1, len(hosts)))) as pool:
        return dict(zip([host.name for host in hosts], pool.map(ask, hosts), strict=True))


def judge(ended: _Ended, host: str, python: str, seconds: float, is_local: bool) -> HostAnswer:
    """Return what it means how a host's command has ended."""
    said = (ended.err.strip().splitlines() or [""])[-1].strip()
    if ended.code is None:
        return HostAnswer(
            "",
            f"{host} does not answer within {seconds:g} s; see whether it is up and whether ssh "
            f"logs in without a password: ssh -o BatchMode=yes {host} true",
        )
    if ended.code == NO_ANSWER and not is_local:
        return HostAnswer(
            "",
            f"{host} cannot be reached ({said or 'ssh says nothing'}); see that it is up, and that "
            f"ssh logs in without a password: ssh -o BatchMode=yes {host} true",
        )
    if ended.code in (_NOT_EXECUTABLE, _NOT_FOUND):
        return HostAnswer(
            "",
            f"{host} has no {python}; install the same environment at that path there, or name "
            "the host's own in a file for kaitian-env (docs/install.md)",
        )
    if ended.code:
        known = "PackageNotFoundError" in ended.err
        return HostAnswer(
            "",
            f"{host}: {python} has no kaitian-mpi; install it there with pip"
            if known
            else f"{host}: {python} fails ({said or f'exit code {ended.code}'}); run it there",
        )
    lines = ended.out.split()  # a login script may print something before it
    return HostAnswer(lines[-1] if lines else "")


class PendingAnswer:
    """A host that has been asked what `ask_hosts` asks; nothing here waits for it."""

    def __init__(
        self, agent: Sequence[str], host: Host, python: str, seconds: float, is_local: bool = False
    ) -> None:
        """Ask; the arguments are as those of `ask_hosts`."""
        self._host, self._python, self._seconds, self._is_local = host, python, seconds, is_local
        self._until = time.monotonic() + seconds
        self._answer: HostAnswer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        words = _question(agent, host, python, seconds, is_local)
        try:
            # In its own session, as in `_run`.
            self._process = subprocess.Popen(  # noqa: S603
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )
        except OSError as error:
            self._finish(_NOT_FOUND, error.strerror or str(error))

    def poll(self) -> HostAnswer | None:
        """Return the answer; None until there is one, at most for the seconds given."""
        if self._answer is None and self._process is not None:
            code = self._process.poll()
            if code is not None or time.monotonic() > self._until:
                self._finish(code)
        return self._answer

    def cancel(self) -> None:
        """Stop asking."""
        if self._answer is None:
            self._finish(None)

    def _finish(self, code: int | None, fault: str = "") -> None:
        if self._process is not None and code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        out, err = _content(self._out), fault or _content(self._err)
        self._out.close()
        self._err.close()
        ended = _Ended(code, out, err)
        self._answer = judge(ended, self._host.name, self._python, self._seconds, self._is_local)


def version_faults(answers: Mapping[str, HostAnswer], own: str) -> list[str]:
    """Return a line for each host with another version of this package than this one's."""
    return [
        f"{host} has kaitian-mpi {answer.version}, and this host {own}; install the same version "
        "on every host"
        for host, answer in answers.items()
        if not answer.fault and answer.version != own
    ]


def _question(
    agent: Sequence[str], host: Host, python: str, seconds: float, is_local: bool
) -> list[str]:
    words = [python, "-c", _SHOW_VERSION]
    # The remote shell takes the words apart again.
    return words if is_local else probe_command(agent, host, seconds, [shlex.join(words)])


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_ANSWER_BYTES).decode(errors="replace")


def _run(words: Sequence[str], seconds: float) -> _Ended:
    try:
        # In its own session: no terminal to prompt for a password, and one signal ends all of it.
        process = subprocess.Popen(  # noqa: S603 (a list of words; the host name in it is checked)
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        return _Ended(_NOT_FOUND)
    except OSError as error:
        return _Ended(_NOT_EXECUTABLE, "", error.strerror or str(error))
    try:
        out, err = process.communicate(timeout=seconds)
        return _Ended(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return _Ended(None)
