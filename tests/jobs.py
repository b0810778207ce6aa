"""Real commands in subprocesses. Their ranks may outnumber the cores and run as root."""

from __future__ import annotations

import atexit
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from shared.emulated_hosts import EmulatedHosts
from shared.launch import AS_ROOT, ENVIRONMENT, PYTHON
from shared.processes import parent_of, rank_of

from kaitian_mpi.runtime.forked_rank import FORK
from kaitian_mpi.runtime.start_watch_process import rank_behind

SURVIVING = ("--with-ft", "ulfm")
SCRIPTS = Path(sysconfig.get_path("scripts"))
_HERE = Path(__file__).parent
PLANTED = _HERE / "e2e"
_PROGRAMS = ("kaitian-train", "kaitian-plan", "kaitian-run", "kaitian-doctor")
LONGEST_SEC = 300
_PRINT_TRACES_SEC = 2.0
SOON_SEC = 120
"""More than what comes takes on a busy machine, and less than waits for what never does."""
IS_OPEN_MPI = not os.environ.get("KAITIAN_MPI", "openmpi").startswith("mpich")
EVEN = "--balance off --run-dir run --log-interval 0".split()


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float
    ended_at: float

    @property
    def text(self) -> str:
        return self.out + self.err

    def checked(self, code: int | None) -> Self:
        """Return this, if it has ended with this code; None: any."""
        assert code is None or self.code == code, self.text
        return self


@cache
def _shared_memory() -> Path:
    """Return a folder for the shared memory of this process's jobs, which is removed at the end."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="kaitian-test-", dir=memory if memory.is_dir() else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def start(
    *command: str, cwd: Path, env: dict[str, str] | None = None, stderr: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    # Open MPI (5.0.11) names the files in it by 16 bits of the job's name: two of the thousand jobs
    # of a test run would have the same, and crash.
    variables = {"OMPI_MCA_btl_sm_backing_directory": tempfile.mkdtemp(dir=_shared_memory())}
    variables |= {"PYTHONPATH": f"{PLANTED}:{_HERE.parent}", FORK: "0"}
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env={**ENVIRONMENT, **variables, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(process: subprocess.Popen[str], started_at: float, code: int | None = 0) -> Ended:
    """Wait for a process, which has to end with this code; None: with any."""
    try:
        out, err = process.communicate(timeout=LONGEST_SEC)
    except subprocess.TimeoutExpired:
        _show_where_ranks_are(process)
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still running after {LONGEST_SEC} s\n{out}\n{err}")
    now = time.time()
    err = err.replace("\0", "")  # Open MPI ends its own messages with one
    return Ended(process.returncode, out, err, now - started_at, now).checked(code)


def _show_where_ranks_are(process: subprocess.Popen[str]) -> None:
    """Have each forked rank print the traceback of each of its threads; others have no handler."""
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(process.pid).children(recursive=True):
            rank = rank_behind(child.pid)
            if rank != child.pid:
                os.kill(rank, signal.SIGRTMIN)
        time.sleep(_PRINT_TRACES_SEC)


def run_ranks(ranks: int, *command: str, **options: Any) -> Ended:
    """Run a command under mpirun, whose options may come first; see `run_alone`."""
    return run_alone("mpirun", "-np", str(ranks), *map(str, command), **options)


def run_alone(
    *command: str, cwd: Path, fresh: bool = False, code: int | None = 0, **env: str
) -> Ended:
    """Run a command as one rank, without mpirun; see `PLANTED` for models.

    Each rank is a fresh process, or else forked, see `fork_server.py`. The command has to end with
    this code; None: with any.
    """
    words = command if fresh else forked(command)
    return finish(start(*words, cwd=cwd, env=env), time.time(), code)


def forked(command: Sequence[str]) -> list[str]:
    """Return the command with its ranks forked; unchanged with MPICH, and without Linux's calls.

    A rank of MPICH has a connection to its launcher, which a forked process would not have.
    """
    if not IS_OPEN_MPI or not hasattr(os, "pidfd_open"):
        return [*command]
    programs = (PYTHON, *_PROGRAMS, *(str(SCRIPTS / name) for name in _PROGRAMS))
    at = next((index for index, word in enumerate(command) if word in programs), len(command))
    rank = [PYTHON, "-I", "-S", str(_HERE / "forked_rank.py"), _fork_server()]
    return [*command[:at], *(rank if at < len(command) else []), *command[at:]]


def write_forking_program(folder: Path) -> Path:
    """Write a kaitian-train that has its process forked, for launchers that find it by PATH."""
    folder.mkdir()
    program = folder / "kaitian-train"
    words = shlex.join(forked([str(SCRIPTS / "kaitian-train")]))
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    return program


def write_launching_program(folder: Path, name: str) -> Path:
    """Write a command that starts mpirun as the installed one of its name does, with forked ranks.

    By itself it is a fresh process, like the command. Its folder has to be first in PATH.
    """
    folder.mkdir(exist_ok=True)
    program = folder / name
    ranks = shlex.join(forked([str(SCRIPTS / name)]))
    code = f"import sys; sys.argv[0] = {str(program)!r}; "
    code += f"from kaitian_mpi.cli.{name.removeprefix('kaitian-')} import main; sys.exit(main())"
    launcher = shlex.join([PYTHON, "-c", code])
    program.write_text(
        f'#!/bin/sh\nif [ -n "$OMPI_COMM_WORLD_RANK" ]; then exec {ranks} "$@"; fi\n'
        f'exec {launcher} "$@"\n'
    )
    program.chmod(0o755)
    return program


def write_forking_python(path: Path) -> Path:
    """Write an interpreter, as its users see it, whose processes are forked."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(forked([PYTHON]))} "$@"\n')
    path.chmod(0o755)
    return path


@contextmanager
def fork_server(*modules: str, **env: str) -> Iterator[str]:
    """Yield the socket of a fork of the fork server that has loaded more modules."""
    with _fork_server_of(forked([PYTHON]), *modules, **env) as path:
        yield path


def _fork_server() -> str:
    """Return the socket of a `fork_server.py`: a given one, or one that ends with this process."""
    return os.environ.get("KAITIAN_FORK_SERVER") or _own_fork_server()


@cache
def _own_fork_server() -> str:
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    return until_the_end.enter_context(_fork_server_of([PYTHON]))


@contextmanager
def _fork_server_of(python: Sequence[str], *modules: str, **env: str) -> Iterator[str]:
    # Only this user may enter it. Not below $TMPDIR: a socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="kaitian-fork-server-", dir="/tmp") as folder:
        path = f"{folder}/socket"
        words = [*python, str(_HERE / "fork_server.py"), path, *modules]
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        with subprocess.Popen(words, env=ENVIRONMENT | env, **pipes) as server:  # closes its stdin
            assert server.stdout.readline() == b"ready\n"
            yield path


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_readings(folder: Path) -> list[dict[str, Any]]:
    """Return the readings in a run folder's metrics.jsonl, without its evaluations."""
    return [line for line in read_lines(folder / "metrics.jsonl") if "validation" not in line]


def weights_in(folder: Path) -> dict[str, Any]:
    """Return the weights that the run in a folder of jobs has saved at its end."""
    import torch

    return torch.load(folder / "run" / "checkpoints" / "model.pt", weights_only=True)


def steps_saved(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "run" / "checkpoints").glob("step-*.json")}


def newest_checkpoint(folder: Path) -> Path:
    return folder / "run" / "checkpoints" / f"{max(steps_saved(folder))}.pt"


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max((one[key] - other[key]).abs().max().item() for key in one)


def steps_shown(ended: Ended) -> list[int]:
    return [int(step) for step in re.findall(r"\| step (\d+)/", ended.text)]


class Job:
    """A job under mpirun whose lines are heard as they come; its ranks can be sent signals.

    Its stderr goes with its output. Leaving it as a context ends it, if it has not ended.
    """

    _starts_launcher = not IS_OPEN_MPI  # the process that starts the ranks, which mpirun else does

    def __init__(
        self, ranks: int, *command: str,
        cwd: Path, survives: bool = True, fresh: bool = True, **env: str,
    ) -> None:  # fmt: skip
        words = ("mpirun", *SURVIVING * survives, "-np", str(ranks))
        words += command if fresh else tuple(forked(command))
        self._start(*words, cwd=cwd, env=env)

    def _start(self, *command: str, cwd: Path, env: dict[str, str]) -> None:
        self.started_at = time.time()
        self.process = start(*command, cwd=cwd, env=env, stderr=subprocess.STDOUT)
        self.lines: list[str] = []
        self._heard: queue.Queue[str | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its ranks go with it
        self._listener.join()
        self.process.wait()
        # A killed mpirun leaves its folder, and a later one with its pid cannot start.
        left = Path(tempfile.gettempdir(), f"ompi.{self.process.pid}")
        shutil.rmtree(left, ignore_errors=True)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return at the next line that has the pattern; a line is looked at once."""
        deadline = time.monotonic() + LONGEST_SEC
        while True:
            try:
                line = self._heard.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no {pattern!r} within {LONGEST_SEC} s\n{self.text}")
            if line is None:
                pytest.fail(f"ended without {pattern!r}\n{self.text}")
            if match := re.search(pattern, line):
                return match

    def wait_until(self, is_true: Callable[[], bool], problem: str) -> None:
        """Wait for something that the job prints no line about."""
        deadline = time.monotonic() + LONGEST_SEC
        while not is_true():
            if time.monotonic() > deadline:
                pytest.fail(f"{problem} within {LONGEST_SEC} s\n{self.text}")
            time.sleep(0.05)

    def rank_pids(self) -> dict[int, int]:
        """Return the processes of the ranks that live, by world rank."""
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        launchers = {self.process.pid}
        if self._starts_launcher:
            launchers = {pid for pid in pids if parent_of(pid) == self.process.pid}
        pids_by_rank = {rank_of(pid): pid for pid in pids if parent_of(pid) in launchers}
        return {rank: rank_behind(pid) for rank, pid in pids_by_rank.items() if rank is not None}

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks, at once."""
        pids = self.rank_pids()
        for rank in ranks:
            os.kill(pids[rank], number)

    def kill(self, *ranks: int) -> None:
        self.signal(signal.SIGKILL, *ranks)

    def finish(self, code: int | None = 0) -> Ended:
        """Wait for its end, which has to be with this code; None: with any."""
        try:
            exit_code = self.process.wait(LONGEST_SEC)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {LONGEST_SEC} s\n{self.text}")
        now = time.time()
        self._listener.join()
        return Ended(exit_code, self.text, "", now - self.started_at, now).checked(code)

    def _listen(self) -> None:
        for line in self.process.stdout:
            line = line.rstrip("\n").replace("\0", "")  # Open MPI ends its own messages with one
            self.lines.append(line)
            self._heard.put(line)
        self._heard.put(None)


class LaunchedJob(Job):
    """A job of a command that starts mpirun itself, such as `kaitian-train -n 2`.

    It forks its ranks itself; other tests have the ranks forked as those of mpirun are.
    """

    _starts_launcher = True

    def __init__(self, *command: str, cwd: Path, **env: str) -> None:
        self._start(*command, cwd=cwd, env={FORK: "1", **env})

    def started(self) -> list[psutil.Process]:
        """Return all processes that the command has started."""
        return psutil.Process(self.process.pid).children(recursive=True)


class HostsJob(Job):
    """The same on emulated hosts; the command has `mpirun` in it, and may begin with another.

    Without `on_all`, that other one chooses the hosts. Ranks that need not be fresh are forked if
    they then share the cores with their host's daemon as fresh ones do; see `EmulatedHosts`.
    Without `survives`, or where MPI is not Open MPI, the loss of a rank ends the job.
    """

    def __init__(
        self, hosts: EmulatedHosts, *command: str,
        cwd: Path, on_all: bool = True, fresh: bool = True, survives: bool = True,
    ) -> None:  # fmt: skip
        self._hosts = hosts
        if IS_OPEN_MPI:
            options = [*SURVIVING * survives, "--bind-to", "none"]
            options += ["--hostfile", str(hosts.hostfile)] if on_all else []
            for name in (*AS_ROOT, "PYTHONPATH"):
                options += ["-x", name]
        else:
            options = ["-f", str(hosts.mpich_hostfile)] if on_all else []
        at = command.index("mpirun") + 1
        ranks = forked(command[at:]) if hosts.have_group and not fresh else command[at:]
        words = hosts.on_first(*command[:at], *options, *ranks)
        self._start(*words, cwd=cwd, env={})

    def rank_pids(self) -> dict[int, int]:
        return self._hosts.rank_pids()
