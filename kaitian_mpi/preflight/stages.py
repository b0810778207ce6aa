"""Examinations that may hang or crash: each in a process of its own, with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kaitian_mpi.runtime.mpi_libraries import LIBRARIES
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.runtime.system import anonymous_file

COMMAND = (sys.executable, "-P", "-m", "kaitian_mpi.preflight.stage_process")
"""The command of an examination's process; -P: nothing is imported from the current folder."""

_JOINING = tuple(library.joining for library in LIBRARIES)
_POLL_SEC = 0.01
_MAX_MESSAGE = 400


class StageError(Exception):
    """An examination failed; says why in one line."""


class Stage:
    """One examination, which has been started.

    Args:
        name: one of those in `stage_process.py`.
        arguments: as JSON can hold them.
    """

    def __init__(self, name: str, **arguments: Any) -> None:
        self.name = name
        self._process = _Process(
            [*COMMAND, name, json.dumps(arguments)], outside_the_job(os.environ)
        )

    def result(self, deadline: float) -> Any:
        """Return its facts.

        Args:
            deadline: by `time.monotonic`; it is killed then.

        Raises:
            StageError: it failed, or took too long.
        """
        code, out, err = self._process.finish(deadline)
        if code is None:
            raise StageError(
                f"no answer within {self._process.age:.0f} s{_last(err, '; it said: ')}"
            )
        if code:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise StageError(_last(err, "") or how)
        try:
            return json.loads(out)
        except ValueError:
            raise StageError(f"no result{_last(err, ': ')}") from None

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()


def run(
    command: Sequence[str], limit_sec: float, environ: Mapping[str, str]
) -> tuple[int | None, str, str]:
    """Run a command; return its exit code, None if it was killed at the limit, and its output.

    Raises:
        OSError: it cannot be started.
    """
    return _Process(command, environ).finish(time.monotonic() + limit_sec)


def outside_the_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is no rank, even if what it imports starts MPI.

    With the variables by which MPI finds the launcher, it would join the job as this very rank, and
    write into the shared memory of the real one.
    """
    return {name: value for name, value in environ.items() if not name.startswith(_JOINING)}


class _Process:
    """A process with its output in memory, so that it never waits for a reader."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._out = anonymous_file("out")
        self._err = anonymous_file("err")
        self._began = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603  # a list of words, no shell
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,  # one signal ends what it has started too
        )

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._began

    def finish(self, deadline: float) -> tuple[int | None, str, str]:
        """Wait for the process until the deadline; see `run`."""
        limit = max(0.0, deadline - time.monotonic())
        ended = wait_until(lambda: self._process.poll() is not None, limit, _POLL_SEC)
        if not ended:
            self.kill()
        return self._process.poll() if ended else None, _content(self._out), _content(self._err)

    def kill(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _content(descriptor: int) -> str:
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def _last(text: str, before: str) -> str:
    """Return the last line with something in it, after `before`; empty if there is none."""
    lines = [line.strip() for line in text.replace("\0", "").splitlines() if line.strip(" \t-=")]
    return before + lines[-1][:_MAX_MESSAGE] if lines else ""
