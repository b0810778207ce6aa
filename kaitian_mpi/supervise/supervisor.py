"""Starts a job, and restarts it after failures until its summary says that it has finished."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.observe.files import read_json, read_last_lines
from kaitian_mpi.preflight.verdict import count_text, list_names
from kaitian_mpi.supervise.hosts_file import HostChanges
from kaitian_mpi.supervise.job_runner import JobRunner
from kaitian_mpi.supervise.job_snapshots import JobSnapshots
from kaitian_mpi.supervise.mpirun_command import TRAIN
from kaitian_mpi.supervise.remote_shell import RemoteShell
from kaitian_mpi.supervise.starts import JobCommand, Start, plan_start
from kaitian_mpi.train.summary import NAME, Summary

_QUICK_SEC = 5.0
_MAX_QUICK = 2
_PAUSE_SEC = 5.0
_CHECK_SEC = 1.0


@dataclass(frozen=True)
class RunState:
    """A job's state at one moment, read from its run folder."""

    finished: bool = False
    steps: int = 0
    """Steps according to the summary."""
    last_step: int = 0
    """Step of the last line in metrics.jsonl, to which one is added every few steps."""
    measured_at: float = 0.0
    """Time of that line, in seconds since 1970."""
    confirmed_at: int = field(default=0, compare=False)
    """When the summary was last written or confirmed, in nanoseconds; 0 if there is none."""

    def has_finished_since(self, before: RunState) -> bool:
        """Return whether the job has reported since then that it is finished."""
        return self.finished and (not before.finished or self.confirmed_at != before.confirmed_at)

    def is_beyond(self, before: RunState) -> bool:
        """Return whether steps have been trained since then.

        Lines of steps that are trained again are removed first, so their times tell. The clocks of
        two hosts may differ, so the numbers tell as well.
        """
        return (
            self.steps > before.steps
            or self.last_step > before.last_step
            or self.measured_at > before.measured_at
        )


def read_state(folder: Path) -> RunState:
    """Read a run folder; return the default state if it is missing or unreadable."""
    summary = Summary.from_json(read_json(folder / NAME))
    confirmed_at = 0
    with suppress(OSError):
        confirmed_at = (folder / NAME).stat().st_mtime_ns
    last = (read_last_lines(folder / "metrics.jsonl") or [{}])[-1]
    return RunState(
        finished=summary.finished,
        steps=summary.steps or 0,
        last_step=last.get("step") or 0,
        measured_at=last.get("time") or 0.0,
        confirmed_at=confirmed_at,
    )


def supervise(
    job: JobCommand,
    runner: JobRunner,
    shell: RemoteShell,
    snapshots: JobSnapshots,
    max_restarts: int,
    changes: HostChanges | None = None,
) -> int:
    """Run a job to its end.

    mpirun's exit code is not reliable: it is 0 when a host was lost. Only `finished` in the job's
    `summary.json`, written by this start, counts: a run that has finished before is started once,
    because the command may ask for more training. A job is not restarted after a mistake in the
    command line, after failing immediately twice, or if its results cannot be written. Snapshots in
    the hosts' memory are removed at the end, if the disk has their content. Restarts because the
    job's hosts have changed do not count.

    Returns:
        The exit code: 0 if the job has finished, or has saved and ended as SIGUSR2 asks; 128 + n
        after another signal n, 2 after a usage error, 74 if the results cannot be written;
        otherwise mpirun's last code, with 1 in place of 0.
    """
    code = 1
    supervisor = _Supervisor(job, runner, shell, snapshots, max_restarts + 1, changes)
    try:
        code = supervisor.run()
    finally:
        supervisor.close(code)
    return code


class _Supervisor:
    """The state between the starts of one job."""

    def __init__(
        self,
        job: JobCommand,
        runner: JobRunner,
        shell: RemoteShell,
        snapshots: JobSnapshots,
        max_starts: int,
        changes: HostChanges | None,
    ) -> None:
        self._job = job
        self._runner = runner
        self._shell = shell
        self._snapshots = snapshots
        self._max_starts = max_starts
        self._changes = changes
        self._first = read_state(job.folder)
        self._left_out: frozenset[str] = frozenset()
        self._idle = 0  # consecutive starts without progress
        self._quick = 0  # consecutive starts on the same hosts that failed immediately
        self._trained_on: set[str] | None = None  # the hosts of the last start that trained
        self._joined: set[str] = set()  # the hosts added since then
        self._is_asked = False  # whether the running job was asked to save and end
        self._check_at = 0.0

    def run(self) -> int:
        runner = self._runner
        number = failures = 1
        while True:
            before = read_state(self._job.folder)
            code, is_moved = self._start(number, before)
            state = read_state(self._job.folder)
            if state.has_finished_since(before):
                runner.report(f"finished after {count_text(number, 'start')}")
                return 0
            if runner.stopped:
                return self._end_by_signal(code)
            has_trained = state.is_beyond(before)
            if code == UserError.exit_code and not has_trained and not self._joined:
                return code
            if code == StorageError.exit_code:
                runner.report("not started again: the job could not write its results, see above")
                return code
            if is_moved or self._joined:
                self._idle = self._quick = 0
                why = f"joined, and the job ended with code {code} before its next step"
                self._lose(self._joined, why)
            else:
                if failures == self._max_starts or self._quick == _MAX_QUICK:
                    return self._give_up(number, code)
                runner.report(f"mpirun ended with code {code}, and the job is not finished")
                failures += 1
            if not self._choose_hosts():
                return self._end_by_signal(code) if runner.stopped else 1
            if self._idle > 1 and not runner.stopped:
                runner.pause(_PAUSE_SEC)
            if runner.stopped:
                return self._end_by_signal(code)
            number += 1

    def close(self, code: int) -> None:
        """Stop following the hosts, and remove snapshots that are no longer needed."""
        if self._changes is not None:
            self._changes.close()
            self._runner.withdraw_request()
        has_finished = code == 0 and self._runner.stopped != signal.SIGUSR2
        self._snapshots.end(has_finished)

    def _start(self, number: int, before: RunState) -> tuple[int, bool]:
        """Start the job, wait for its end, and record whether it made progress.

        Returns:
            mpirun's exit code, and whether the job ended on request.
        """
        runner = self._runner
        changes = self._changes
        start = self._plan(before, self._job.folder / f"hostfile-start-{number}")
        limit = f" of {self._max_starts}" if changes is None else ""
        runner.report(f"start {number}{limit}: {start.shape}")
        began = runner.now()
        self._is_asked = False
        if changes is None:
            code = runner.run(start.words)
        else:
            runner.withdraw_request()
            changes.begin()
            code = runner.run(start.words, partial(self._watch, before, changes))
        is_refused = changes is not None and runner.withdraw_request()
        if read_state(self._job.folder).is_beyond(before):
            self._idle = self._quick = 0
            self._joined = set()
            self._trained_on = {host.name for host in self._job.left(self._left_out)}
        else:
            self._idle += 1
            self._quick = self._quick + 1 if runner.now() - began < _QUICK_SEC else 0
        # mpirun's code is not 0 if a rank was lost earlier, which the job has survived.
        return code, self._is_asked and (code == 0 or not is_refused)

    def _plan(self, before: RunState, hostfile: Path) -> Start:
        # Results of an earlier run in the folder were not trained by these starts.
        trained = before != self._first and before != RunState()
        start = plan_start(self._job, self._left_out, trained, str(hostfile))
        if start.hostfile:
            try:
                hostfile.parent.mkdir(parents=True, exist_ok=True)
                hostfile.write_text(start.hostfile)
            except OSError as error:
                raise UserError(
                    f"{hostfile}: {error.strerror}; name a --run-dir that can be written"
                ) from error
        return start

    def _watch(self, before: RunState, changes: HostChanges) -> None:
        """Ask the running job to save and end if it should move to other hosts.

        A job without steps yet has nothing to save, so it is not asked.
        """
        runner = self._runner
        now = runner.now()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_SEC
        is_due = changes.poll(now) and not self._is_asked
        if is_due and read_state(self._job.folder).is_beyond(before):
            names = list_names([host.name for host in changes.wanted])
            runner.report(f"asking the job to save and end, to start it again on {names}")
            self._is_asked = True
            runner.request_restart()

    def _lose(self, names: set[str] | frozenset[str], why: str) -> None:
        if self._changes is not None:
            self._changes.lose(names, self._runner.now(), why)
        else:
            for name in sorted(names):
                self._runner.report(f"host {name} {why}")

    def _choose_hosts(self) -> bool:
        """Choose the next start's hosts; return whether there are any."""
        runner = self._runner
        changes = self._changes
        before = self._left_out
        if changes is None:
            if not self._job.remote:
                return True
            # All remote hosts, including lost ones, which may be back.
            self._left_out = self._shell.lost_hosts(self._job.remote)
            self._lose(self._left_out, "does not answer")
        else:
            self._job = self._job.with_hosts(changes.file.hosts)
            runner.replace_job(self._job)
            wanted_names = {host.name for host in changes.wanted}
            wanted = [host for host in self._job.remote if host.name in wanted_names]
            lost = self._shell.lost_hosts(wanted)
            self._lose(lost, "does not answer")
            self._left_out = changes.left_out
        self._snapshots.follow_hosts(self._job.remote, self._left_out)
        if self._left_out != before:
            self._quick = 0  # the next start uses other hosts
        names = {host.name for host in self._job.left(self._left_out)}
        if not names:
            runner.report(
                "not started again, as no host answers; check them by ssh, then "
                f"{self._how_to_continue}"
            )
            return False
        if changes is not None and self._trained_on is not None:
            self._trained_on &= names  # hosts that come back later join
            self._joined = names - self._trained_on
            self._snapshots.remove_stale([h for h in self._job.remote if h.name in self._joined])
        return True

    def _give_up(self, number: int, code: int) -> int:
        limit = "--max-restarts"
        if self._quick == _MAX_QUICK:
            limit = "the last two failed immediately, on the same hosts"
        self._runner.report(
            f"gave up after {count_text(number, 'start')} ({limit}); mpirun's last exit code was "
            f"{code}; see the errors above, then {self._how_to_continue}"
        )
        return code or 1

    @property
    def _how_to_continue(self) -> str:
        job = self._job
        if job.command.program != TRAIN:
            return "run the same command again"
        return f"run the same command with --run-dir {job.config.run_dir} --resume auto"

    def _end_by_signal(self, code: int) -> int:
        runner = self._runner
        runner.report(f"ended by {signal.Signals(runner.stopped).name}; not started again")
        if runner.stopped != signal.SIGUSR2:
            return 128 + runner.stopped
        return 0 if runner.has_saved else code or 1
