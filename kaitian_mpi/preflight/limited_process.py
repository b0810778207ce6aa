"""Runs a process with a time limit; its output is in memory, so it never waits for a reader."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple, TypeVar

from kaitian_mpi.runtime.system import anonymous_file

NOT_EXECUTABLE = 126  # a shell's exit codes
NOT_FOUND = 127
MAX_AT_ONCE = 256
"""The most processes at once: each has two open files, and the limit may be 1,024."""
_MAX_BYTES = 1 << 24

Name = TypeVar("Name")


class Ended(NamedTuple):
    """The end of a process."""

    code: int | None
    """The exit code; None if it took too long."""
    out: str = ""
    err: str = ""


class LimitedProcess:
    """A process that is killed, with its child processes, when it takes too long.

    A command that cannot be started ends with a shell's exit code.
    """

    def __init__(
        self, command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None
    ) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds
        self._ended: Ended | None = None
        self._files = [os.fdopen(anonymous_file(name), "w+b") for name in ("out", "err")]
        try:
            # Its own session has no terminal to prompt on, and one signal ends all its processes.
            self._process = subprocess.Popen(  # noqa: S603 (a list of words, no shell)
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._files[0],
                stderr=self._files[1],
                start_new_session=True,
            )
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            self._finish(NOT_FOUND if is_missing else NOT_EXECUTABLE, str(error))

    def poll(self) -> Ended | None:
        """Return the end of the process; None while it runs within its time limit. Never blocks."""
        if self._ended is None:
            code = self._process.poll()
            if code is not None:
                self._finish(code)
            elif time.monotonic() > self._until:
                self.kill()
        return self._ended

    def wait(self) -> Ended:
        """Wait for the end of the process, within its time limit."""
        if self._ended is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, self._until - time.monotonic()))
        while (ended := self.poll()) is None:
            time.sleep(0.01)
        return ended

    def kill(self) -> None:
        """Kill the process if it is still running."""
        if self._ended is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that a device blocks cannot be killed.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._finish(None)

    def _finish(self, code: int | None, fault: str = "") -> None:
        out, err = (_content(file) for file in self._files)
        self._ended = Ended(code, out, err + fault)


def run_all(commands: Mapping[Name, Sequence[str]], seconds: float) -> dict[Name, Ended]:
    """Run named commands, up to 256 at once, each with this time limit."""
    ended: dict[Name, Ended] = {}
    names = list(commands)
    for first in range(0, len(names), MAX_AT_ONCE):
        batch = names[first : first + MAX_AT_ONCE]
        running = {name: LimitedProcess(commands[name], seconds) for name in batch}
        ended |= {name: process.wait() for name, process in running.items()}
    return ended


def _content(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read(_MAX_BYTES).decode(errors="replace")
