"""Examines one process and its host: all that needs no other rank.

What may hang or crash is examined in a process of its own (`stage_process.py`), with a time limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kaitian_mpi.preflight.collect import collect
from kaitian_mpi.preflight.facts import (
    JobFacts,
    Launcher,
    Mpi,
    RankFacts,
    Storage,
    devices_from_json,
)
from kaitian_mpi.runtime.mpi_libraries import LIBRARIES, OVERSUBSCRIBE, parse_launcher_version
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.runtime.system import anonymous_file

COMMAND = (sys.executable, "-P", "-m", "kaitian_mpi.preflight.stage_process")
"""The command of an examination's process; -P: nothing is imported from the current folder."""

_JOINING = tuple(library.joining for library in LIBRARIES)
_POLL_SEC = 0.01
_MAX_MESSAGE = 400
_VERSION_SEC = 10.0
_DEVICES, _STORAGE, _MPI = "devices", "run folder", "mpi"


class StageError(Exception):
    """An examination failed; says why in one line."""


class _Process:
    """A process with its output in memory, so that it never waits for a reader."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._out = anonymous_file("out")
        self._err = anonymous_file("err")
        self.began = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603  # a list of words, no shell
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,  # one signal ends what it has started too
        )

    def finish(self, deadline: float) -> tuple[int | None, str, str]:
        """Wait for the process until the deadline; see `run`."""
        limit = max(0.0, deadline - time.monotonic())
        ended = wait_until(lambda: self._process.poll() is not None, limit, _POLL_SEC)
        if not ended:
            self.kill()
        return self._process.poll() if ended else None, _content(self._out), _content(self._err)

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Stage(_Process):
    """One examination, which has been started.

    Args:
        name: one of those in `stage_process.py`.
        arguments: as JSON can hold them.
    """

    def __init__(self, name: str, **arguments: Any) -> None:
        self.name = name
        super().__init__([*COMMAND, name, json.dumps(arguments)], outside_the_job(os.environ))

    def result(self, deadline: float) -> Any:
        """Return its facts; kill it at the deadline, by `time.monotonic`.

        Raises:
            StageError: it failed, or took too long.
        """
        code, out, err = self.finish(deadline)
        if code is None:
            waited = time.monotonic() - self.began
            raise StageError(f"no answer within {waited:.0f} s{_last(err, '; it said: ')}")
        if code:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise StageError(_last(err, "") or how)
        try:
            return json.loads(out)
        except ValueError:
            raise StageError(f"no result{_last(err, ': ')}") from None


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


def _content(descriptor: int) -> str:
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def _last(text: str, before: str) -> str:
    """Return the last line with something in it, after `before`; empty if there is none."""
    lines = [line.strip() for line in text.replace("\0", "").splitlines() if line.strip(" \t-=")]
    return before + lines[-1][:_MAX_MESSAGE] if lines else ""


def examine_launcher(limit_sec: float) -> Launcher:
    """Ask mpirun for its version, and have it start two ranks that count themselves.

    Args:
        limit_sec: how long the start may take.
    """
    path = shutil.which("mpirun") or ""
    if not path:
        return Launcher(path="", library="", started=None, error="")
    try:
        _, out, err = run([path, "--version"], _VERSION_SEC, os.environ)
        library = parse_launcher_version(out + err)
        # Two ranks even where there is one core.
        environ = {**OVERSUBSCRIBE, **os.environ}
        command = [path, "-np", "2", *COMMAND, "count", "{}"]
        code, out, err = run(command, limit_sec, environ)
    except OSError as error:
        return Launcher(path=path, library="", started=None, error=str(error))
    if code == 0:
        return Launcher(path=path, library=library, started=parse_count(out), error="")
    how = f"no answer within {limit_sec:g} s" if code is None else f"exit code {code}"
    said = " ".join(re.sub(r"-{4,}", " ", (err or out).replace("\0", "")).split())
    text = f"{how}: {said[:_MAX_MESSAGE]}" if said else how
    return Launcher(path=path, library=library, started=None, error=text)


def parse_count(text: str) -> int:
    """Return how many ranks each rank saw, the fewest, from what the ranks printed."""
    counts = [json.loads(found)["size"] for found in re.findall(r'\{"size": \d+\}', text)]
    return min(counts, default=0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kaitian-doctor`."""

    devices: str = "auto"
    """As `--devices`."""
    share_device: bool = False
    """As `--share-device`."""
    run_dir: str = "runs"
    """The folder whose file system is examined."""
    timeout: float = 60.0
    """Seconds that an examination may take."""


class Examination:
    """The examinations of one rank, which run in the background.

    Args:
        options: what to examine.
        rank: the rank.
    """

    def __init__(self, options: Options, rank: int) -> None:
        self._deadline = time.monotonic() + options.timeout
        self.first_facts = facts = collect(socket.gethostname(), rank)
        """The facts that are known at once."""
        place = {"local_rank": facts.local_rank, "local_size": facts.local_size, "host": facts.host}
        self._stages = [
            Stage(_DEVICES, devices=options.devices, share=options.share_device, **place)
        ]
        if facts.local_rank == 0:
            self._stages.append(Stage(_STORAGE, run_dir=options.run_dir))

    def start_mpi(self) -> None:
        """Examine MPI in a process of its own, as a job of one rank."""
        self._stages.append(Stage(_MPI))

    def results(self) -> RankFacts:
        """Return the facts when every examination has ended or has taken too long."""
        found: dict[str, Any] = {}
        faults: dict[str, str] = {}
        for stage in self._stages:
            try:
                found[stage.name] = stage.result(self._deadline)
            except StageError as error:
                faults[stage.name] = str(error)
        return replace(
            self.first_facts,
            devices=devices_from_json(found[_DEVICES]) if _DEVICES in found else None,
            storage=Storage(**found[_STORAGE]) if _STORAGE in found else None,
            mpi=Mpi(**found[_MPI]) if _MPI in found else None,
            faults=faults,
        )


def examine_machine(options: Options) -> JobFacts:
    """Examine this machine, without a launcher: also where MPI or torch cannot be loaded."""
    examination = Examination(options, 0)
    examination.start_mpi()
    launcher = examine_launcher(options.timeout)
    return JobFacts(ranks=(examination.results(),), launcher=launcher)
