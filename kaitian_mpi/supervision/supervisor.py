"""Starts a job, and restarts it after failures until its summary says that it has finished."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.launch.hosts import Host
from kaitian_mpi.output.folders import SHM
from kaitian_mpi.supervision.run_state import RunState, read_state
from kaitian_mpi.supervision.starts import Job, Start, list_names, plan_start

_USER_ERROR = UserError.exit_code
_DISK_FULL = StorageError.exit_code
_QUICK_SEC = 5.0
_MAX_QUICK = 2
_PAUSE_SEC = 5.0


class Effects(Protocol):
    """The supervisor's side effects; `process.Machine` is the real implementation."""

    stopped: int
    """The signal that requested a stop; 0 for none."""

    def run(self, words: Sequence[str]) -> int:
        """Run a command to its end and return its exit code."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait."""
        ...

    def now(self) -> float:
        """Return the seconds of a clock."""
        ...

    def lost(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Return the names of the hosts that do not answer."""
        ...

    def save_snapshot(self) -> bool:
        """Write the newest state in memory to disk; return whether the disk has it now."""
        ...

    def remove_snapshots(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Remove the job's snapshots here and on hosts; return those that do not answer."""
        ...

    def report(self, text: str) -> None:
        """Log a line."""
        ...


def supervise(job: Job, effects: Effects, max_restarts: int) -> int:
    """Run a job to its end.

    mpirun's exit code is not reliable: it is 0 when a host was lost. Only `finished` in the job's
    `summary.json`, written by this start, counts: a run that has finished before is started once,
    because the command may ask for more training. Not retried are a mistake in the command line, a
    job that failed immediately twice, and one whose results cannot be written. Snapshots in the
    hosts' memory are removed at the end, if the disk has their content.

    Args:
        job: the job.
        effects: runs commands and probes hosts.
        max_restarts: how many times to restart the job at most.

    Returns:
        The exit code: 0 if the job has finished, 128 + n after signal n, 2 after a usage error, 74
        if the results cannot be written, else mpirun's last one, or 1 instead of its 0.

    Raises:
        UserError: the command cannot be started.
    """
    supervisor, code = _Supervisor(job, effects, max_restarts + 1), 1
    try:
        code = supervisor.run()
    finally:
        supervisor.clean_up(code)
    return code


class _Supervisor:
    """The state between the starts of one job."""

    def __init__(self, job: Job, effects: Effects, max_starts: int) -> None:
        self._job = job
        self._effects = effects
        self._max_starts = max_starts
        self._before = read_state(job.folder)
        self._lost: frozenset[str] = frozenset()
        self._ever_lost: frozenset[str] = frozenset()
        self._idle = 0  # consecutive starts without progress
        self._quick = 0  # consecutive starts on the same hosts that failed immediately

    def run(self) -> int:
        number = 1
        while True:
            before = read_state(self._job.folder)
            code = self._start(number, before)
            state = read_state(self._job.folder)
            if self._effects.stopped:
                return self._end_by_signal()
            if state.has_finished_since(before):
                self._effects.report(f"finished after {_count(number, 'start')}")
                return 0
            if code == _USER_ERROR and not state.is_beyond(before):
                return code
            if code == _DISK_FULL:
                self._effects.report(
                    "not started again: the job could not write its results, see above"
                )
                return code
            if number == self._max_starts or self._quick == _MAX_QUICK:
                return self._give_up(number, code)
            self._effects.report(f"mpirun ended with code {code}, and the job is not finished")
            if not self._prepare_restart():
                return self._end_by_signal() if self._effects.stopped else 1
            number += 1

    def clean_up(self, code: int) -> None:
        """Remove snapshots that are no longer needed from the hosts' memory.

        A run that has finished removes its snapshots itself, where it can.
        """
        job, effects = self._job, self._effects
        if not job.owns_snapshots:
            return
        if code and not effects.save_snapshot():
            effects.report(
                f"the newest state is still in memory ({SHM}): make room on the disk, and run "
                f"the same command with --run-dir {job.run_dir} --resume auto "
                f"--snapshots {job.snapshots}"
            )
            return
        hosts = [host for host in job.remote if code or host.name in self._ever_lost]
        if missed := effects.remove_snapshots(hosts):
            effects.report(
                f"{SHM}/kaitian-{job.snapshots}-* may be left on {list_names(sorted(missed))}"
            )

    def _start(self, number: int, before: RunState) -> int:
        """Start the job, wait for its end, and record whether it made progress."""
        job, effects = self._job, self._effects
        new_hostfile = job.folder / f"hostfile-restart-{number - 1}"
        # Results of an earlier run in the folder were not trained by these starts.
        trained = before.trained and before != self._before
        start = plan_start(job, self._lost, trained, str(new_hostfile))
        _write_hostfile(new_hostfile, start)
        reason = f"{self._name_lost()}; " if self._lost else ""
        effects.report(f"start {number} of {self._max_starts}: {reason}{start.shape}")
        began = effects.now()
        code = effects.run(start.words)
        self._record_progress(before, effects.now() - began)
        return code

    def _record_progress(self, before: RunState, seconds: float) -> None:
        idle = not read_state(self._job.folder).is_beyond(before)
        self._idle = self._idle + 1 if idle else 0
        self._quick = self._quick + 1 if idle and seconds < _QUICK_SEC else 0

    def _prepare_restart(self) -> bool:
        """Probe the hosts; return whether to restart the job."""
        job, effects = self._job, self._effects
        before = self._lost
        if job.remote:
            # All of them, including lost ones, which may be back.
            self._lost = effects.lost(job.remote)
            self._ever_lost |= self._lost
        if self._lost != before:
            self._quick = 0  # the next start uses other hosts
        if self._lost and not job.left(self._lost):
            effects.report(f"{self._name_lost()}; no host is left")
            return False
        if self._idle > 1 and not effects.stopped:
            effects.pause(_PAUSE_SEC)
        return not effects.stopped

    def _name_lost(self) -> str:
        names = [host.name for host in self._job.hosts if host.name in self._lost]
        if len(names) == 1:
            return f"host {names[0]} does not answer"
        return f"hosts {list_names(names)} do not answer"

    def _give_up(self, number: int, code: int) -> int:
        reason = (
            " (the last two failed immediately, on the same hosts)"
            if self._quick == _MAX_QUICK
            else ""
        )
        self._effects.report(
            f"gave up after {_count(number, 'start')}{reason}; mpirun's last exit code was {code}"
        )
        return code or 1

    def _end_by_signal(self) -> int:
        number = self._effects.stopped
        self._effects.report(f"ended by {signal.Signals(number).name}; not started again")
        return 128 + number


def _write_hostfile(path: Path, start: Start) -> None:
    if not start.hostfile:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(start.hostfile)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; name a --run-dir that can be written"
        ) from error


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
