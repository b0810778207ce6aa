"""Starts a job, and restarts it after failures until its summary says that it has finished."""

from __future__ import annotations

import signal
from collections.abc import Collection
from functools import partial
from pathlib import Path

from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.observe.folders import SHM
from kaitian_mpi.runtime.hosts import Host, place_by_slot, total_slots
from kaitian_mpi.supervise.effects import Effects
from kaitian_mpi.supervise.host_changes import HostChanges, joined_hosts
from kaitian_mpi.supervise.run_state import RunState, read_state
from kaitian_mpi.supervise.starts import Job, Start, list_names, plan_start

_USER_ERROR = UserError.exit_code
_DISK_FULL = StorageError.exit_code
_QUICK_SEC = 5.0
_MAX_QUICK = 2
_PAUSE_SEC = 5.0
_LOOK_SEC = 1.0


def supervise(
    job: Job, effects: Effects, max_restarts: int, changes: HostChanges | None = None
) -> int:
    """Run a job to its end.

    mpirun's exit code is not reliable: it is 0 when a host was lost. Only `finished` in the job's
    `summary.json`, written by this start, counts: a run that has finished before is started once,
    because the command may ask for more training. Not retried are a mistake in the command line, a
    job that failed immediately twice, and one whose results cannot be written. Snapshots in the
    hosts' memory are removed at the end, if the disk has their content.

    Args:
        job: the job.
        effects: runs commands and probes hosts.
        max_restarts: how many times to restart the job at most; not counted is where its hosts
            have changed.
        changes: decides on which hosts of a hosts file it is; None without such a file.

    Returns:
        The exit code: 0 if the job has finished, 128 + n after signal n, 2 after a usage error, 74
        if the results cannot be written, else mpirun's last one, or 1 instead of its 0.

    Raises:
        UserError: the command cannot be started.
    """
    supervisor, code = _Supervisor(job, effects, max_restarts + 1, changes), 1
    try:
        code = supervisor.run()
    finally:
        if changes is not None:
            changes.close()
            effects.withdraw_request()
        supervisor.clean_up(code)
    return code


class _Supervisor:
    """The state between the starts of one job."""

    def __init__(
        self, job: Job, effects: Effects, max_starts: int, changes: HostChanges | None
    ) -> None:
        self._job, self._changes = job, changes
        self._effects = effects
        self._max_starts = max_starts
        self._before = read_state(job.folder)
        self._lost: frozenset[str] = frozenset()
        self._ever_lost: frozenset[str] = frozenset()
        self._idle = 0  # consecutive starts without progress
        self._quick = 0  # consecutive starts on the same hosts that failed immediately
        self._remote = {host.name: host for host in job.remote}  # all that the job was ever on
        self._trained_on: set[str] | None = None  # the hosts of the last start that trained
        self._joined: list[Host] = []
        self._placed: list[str] = []  # each rank's host in this start
        self._seen = self._before
        self._is_asked = self._has_moved = False
        self._look_at = 0.0

    def run(self) -> int:
        number = failures = 1
        while True:
            before = read_state(self._job.folder)
            code = self._start(number, before)
            state = read_state(self._job.folder)
            if self._effects.stopped:
                return self._end_by_signal()
            if state.has_finished_since(before):
                self._effects.report(f"finished after {_count(number, 'start')}")
                return 0
            if code == _USER_ERROR and not state.is_beyond(before) and not self._joined:
                return code
            if code == _DISK_FULL:
                self._effects.report(
                    "not started again: the job could not write its results, see above"
                )
                return code
            if not self._is_due_to_hosts(code):
                if failures == self._max_starts or self._quick == _MAX_QUICK:
                    return self._give_up(number, code)
                self._effects.report(f"mpirun ended with code {code}, and the job is not finished")
                failures += 1
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
        hosts = [host for host in self._remote.values() if code or host.name in self._ever_lost]
        if missed := effects.remove_snapshots(hosts):
            effects.report(
                f"{SHM}/kaitian-{job.snapshots}-* may be left on {list_names(sorted(missed))}"
            )

    def _start(self, number: int, before: RunState) -> int:
        """Start the job, wait for its end, and record whether it made progress."""
        if self._changes is not None:
            return self._start_on_present_hosts(self._changes, number, before)
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

    def _start_on_present_hosts(self, changes: HostChanges, number: int, before: RunState) -> int:
        """Do as `_start`, on the hosts of the hosts file that are there."""
        effects = self._effects
        hostfile = self._job.folder / f"hostfile-start-{number}"
        # Results of an earlier run in the folder were not trained by these starts.
        trained = before.trained and before != self._before
        start = plan_start(self._job, changes.left_out, trained, str(hostfile))
        _write_hostfile(hostfile, start)
        effects.withdraw_request()
        effects.report(f"start {number}: {start.shape}")
        changes.begin()
        hosts = {host.name for host in changes.wanted}
        self._placed = place_by_slot(changes.wanted, total_slots(changes.wanted) or 0)
        self._is_asked, self._seen = False, before
        began = effects.now()
        code = effects.run(start.words, partial(self._watch, changes, before))
        # mpirun's code is not 0 if a rank was lost earlier, which the job has survived.
        was_refused = effects.withdraw_request()
        self._has_moved = self._is_asked and (code == 0 or not was_refused)
        self._record_progress(before, effects.now() - began)
        if read_state(self._job.folder).is_beyond(before):
            self._trained_on, self._joined = hosts, []
        return code

    def _watch(self, changes: HostChanges, before: RunState) -> None:
        """Ask the running job to save and end if it should be started again on other hosts.

        Not while it starts: it has no step to save yet.
        """
        effects, now = self._effects, self._effects.now()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SEC
        if effects.take_hangup():
            changes.read_again()
        state = read_state(self._job.folder)
        if not self._job.spares:  # else a spare has taken over
            self._lose_hosts_of(state.lost_ranks_since(self._seen), changes, now)
        self._seen = state
        if changes.poll(now) and not self._is_asked and state.is_beyond(before):
            names = list_names([host.name for host in changes.wanted])
            effects.report(f"asking the job to save and end, to start it again on {names}")
            self._is_asked = True
            effects.request_restart()

    def _lose_hosts_of(self, lost: Collection[int], changes: HostChanges, now: float) -> None:
        """Record the hosts of ranks without which the job continues."""
        ranks_of: dict[str, list[str]] = {}
        for rank in sorted(lost):
            if rank < len(self._placed):
                ranks_of.setdefault(self._placed[rank], []).append(str(rank))
        for host, ranks in ranks_of.items():
            plural = "s" if len(ranks) > 1 else ""
            changes.lose([host], now, f"has lost rank{plural} {list_names(ranks)}")

    def _is_due_to_hosts(self, code: int) -> bool:
        """Return whether the job has ended because its hosts change, not by a failure of its own.

        Hosts with which it has never trained are held back.
        """
        if self._changes is None:
            return False
        if not (self._has_moved or self._joined):
            return False
        if self._joined:
            names = [host.name for host in self._joined]
            why = f"joined, and the job ended with code {code} before its next step"
            self._changes.lose(names, self._effects.now(), why)
        self._idle = self._quick = 0
        return True

    def _choose_hosts(self, changes: HostChanges) -> bool:
        """Choose the next start's hosts; return whether there are any."""
        effects = self._effects
        self._job = self._job.with_hosts(changes.entries)
        remote = {host.name for host in self._job.remote}
        lost = effects.lost([host for host in changes.wanted if host.name in remote])
        changes.lose(lost, effects.now(), "does not answer")
        wanted = changes.wanted
        effects.adopt(self._job)
        self._ever_lost |= self._remote.keys() - {host.name for host in wanted}
        self._remote |= {host.name: host for host in self._job.remote}
        if not wanted:
            effects.report("no host is left")
            return False
        if self._trained_on is not None:
            self._trained_on -= changes.left_out  # where they come back, they join
        self._joined = joined_hosts(wanted, self._trained_on)
        if stale := [host for host in self._joined if host.name in remote]:
            effects.remove_stale_snapshots(stale)
        return True

    def _record_progress(self, before: RunState, seconds: float) -> None:
        idle = not read_state(self._job.folder).is_beyond(before)
        self._idle = self._idle + 1 if idle else 0
        self._quick = self._quick + 1 if idle and seconds < _QUICK_SEC else 0

    def _prepare_restart(self) -> bool:
        """Probe the hosts; return whether to restart the job."""
        job, effects = self._job, self._effects
        before = self._lost
        if self._changes is not None:
            if not self._choose_hosts(self._changes):
                return False
        elif job.remote:
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
