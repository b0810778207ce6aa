"""A training job whose ranks can be killed, with its output and the time of each line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shared.processes import parent_of, rank_of

if TYPE_CHECKING:
    from shared.emulated_hosts import EmulatedHosts

_STEP = re.compile(r"epoch \d+/\d+ \| step (\d+)/\d+ \|")
_LOSS = re.compile(r"ranks? .* lost at step (\d+); \d+ ranks? continue")
_ENDING_SEC = 15.0


@dataclass(frozen=True)
class Line:
    """A line of the job's output."""

    at: float
    """When it arrived, by `time.perf_counter`."""
    text: str

    @property
    def step(self) -> int | None:
        """The step whose progress this line shows; None for other lines."""
        found = _STEP.match(self.text)
        return int(found[1]) if found else None

    @property
    def loss_after(self) -> int | None:
        """The last step before a rank was lost; None for lines that report no loss."""
        found = _LOSS.match(self.text)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Launch:
    """How mpirun is started."""

    ranks: int
    hosts: EmulatedHosts | None = None
    """None: all ranks on this machine."""
    restarts: int = 0
    """Restarts allowed to kaitian-supervise; 0: no supervisor."""
    script: tuple[str, ...] = ()
    """A Python script with its first arguments, in place of kaitian-train."""
    hosts_file: Path | None = None
    """`--hosts-file` of kaitian-supervise; None: mpirun's own hostfile, with all hosts."""

    def with_hosts_file(self, path: Path) -> Launch:
        """Return this with a supervisor that reads the hosts from a file."""
        return replace(self, hosts_file=path, restarts=1)

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command line of a job that survives the loss of ranks."""
        scripts = Path(sys.executable).parent
        start = ["mpirun", "--with-ft", "ulfm"]
        if self.hosts_file is None:
            start += ["-np", str(self.ranks)]
        if self.restarts:
            supervise = [str(scripts / "kaitian-supervise"), "--max-restarts", str(self.restarts)]
            if self.hosts_file is not None:
                supervise += ["--hosts-file", str(self.hosts_file)]
            start = [*supervise, *start]
        if self.hosts is None:
            start += ["--map-by", ":OVERSUBSCRIBE"]
        else:
            if self.hosts_file is None:
                start += ["--hostfile", str(self.hosts.hostfile)]
            start += ["--bind-to", "none"]
            for name in sorted(os.environ):
                start += ["-x", name] if name.startswith("OMPI_ALLOW_RUN_AS_ROOT") else []
        script = [sys.executable, *self.script] if self.script else [str(scripts / "kaitian-train")]
        words = [*start, *script, *arguments]
        return words if self.hosts is None else self.hosts.on_first(*words)


class Job:
    """A run of kaitian-train or of a script; leaving the context terminates it."""

    def __init__(self, launch: Launch, run_dir: Path, arguments: list[str]) -> None:
        self.run_dir = run_dir
        self.lines: list[Line] = []
        self._news = threading.Condition()
        self.began = time.perf_counter()
        """When mpirun was started."""
        self._process = subprocess.Popen(
            launch.command([*arguments, "--log-interval=0", f"--run-dir={run_dir}"]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(ending)
                self.wait(_ENDING_SEC)

    def wait_for(self, is_it: Callable[[Line], bool], limit_sec: float) -> Line:
        """Return the first line for which `is_it` is true; wait until it arrives.

        Raises:
            TimeoutError: it did not arrive in time, or the job has ended without it.
        """
        until, seen = time.perf_counter() + limit_sec, 0
        while True:
            with self._news:
                while seen == len(self.lines) and self._reader.is_alive():
                    if not self._news.wait(until - time.perf_counter()):
                        break
                new, seen = self.lines[seen:], len(self.lines)
            for line in new:
                if is_it(line):
                    return line
            if not new:
                raise TimeoutError("".join(f"{line.text}\n" for line in self.lines[-5:]))

    def wait(self, limit_sec: float) -> int | None:
        """Return the job's exit code; None if it is still running at the limit."""
        try:
            code = self._process.wait(limit_sec)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join()
        return code

    def signal(self, number: int) -> None:
        """Send a signal to mpirun."""
        self._process.send_signal(number)

    def pid_of(self, rank: int) -> int:
        """Return the process id of a rank, also of one on an emulated host."""
        parents = _processes_of(rank, str(self.run_dir).encode())
        own = [pid for pid, parent in parents.items() if parent not in parents]
        if len(own) != 1:
            raise RuntimeError(f"rank {rank}: has the processes {own}, but must have one")
        return own[0]

    def summary(self) -> dict[str, Any]:
        """Return the current content of `summary.json`; empty if there is none yet."""
        path = self.run_dir / "summary.json"
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return content

    def keep_output(self) -> Path:
        """Write the output with timestamps to a file that is kept; return its path."""
        number, name = tempfile.mkstemp(prefix="kaitian-failed-", suffix=".txt")
        with os.fdopen(number, "w") as file:
            file.writelines(f"{line.at - self.began:7.2f} {line.text}\n" for line in self.lines)
        return Path(name)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with self._news:
                # Open MPI terminates its own messages with a NUL.
                self.lines.append(Line(time.perf_counter(), text.replace("\0", "").rstrip()))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


def kill(pid: int) -> float:
    """Kill a process; return when, by `time.perf_counter`."""
    at = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    return at


def recovery_after(lines: list[Line], at: float) -> tuple[float, float] | None:
    """Return the seconds from a kill until the others have recovered, and until their next step.

    None if they did not.
    """
    loss = next((line for line in lines if line.loss_after is not None and line.at > at), None)
    step = next((line for line in lines if line.step and loss and line.at >= loss.at), None)
    return (loss.at - at, step.at - at) if loss and step else None


def is_whole(lines: list[Line], steps: int) -> bool:
    """Return whether the output shows every step exactly once.

    The line of the last step before a loss may be missing, as the killed rank may be the one that
    had to print it. The numbers of the following steps still continue from that step.
    """
    done = shown = 0
    for line in lines:
        if line.loss_after is not None:
            if line.loss_after not in (shown, shown + 1):
                return False
            done = shown = line.loss_after
        elif line.step is not None:
            if line.step != done + 1:
                return False
            done = shown = line.step
    return done == steps


def _processes_of(rank: int, word: bytes) -> dict[int, int]:
    """Return pid and parent pid of a rank's processes with `word` in their command lines."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(path.name)
        parent = parent_of(pid)
        is_meant = word in command and b"watchdog" not in command and rank_of(pid) == rank
        if is_meant and parent is not None:
            parents[pid] = parent
    return parents
