"""Starts a job, and restarts it after failures until its summary says that it has finished."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.observe.folders import SHM
from kaitian_mpi.runtime.hosts import Host, place_by_slot, total_slots
from kaitian_mpi.supervise.host_changes import HostChanges, joined_hosts
from kaitian_mpi.supervise.process import Machine
from kaitian_mpi.supervise.run_state import RunState, read_state
from kaitian_mpi.supervise.starts import Job, Start, list_names, plan_start

_QUICK_SEC = 5.0
_MAX_QUICK = 2
_PAUSE_SEC = 5.0
_LOOK_SEC = 1.0


def supervise(
    job: Job, machine: Machine, max_restarts: int, changes: HostChanges | None = None
) -> int:
    """Run a job to its end.

    mpirun's exit code is not reliable: it is 0 when a host was lost. Only `finished` in the job's
    `summary.json`, written by this start, counts: a run that has finished before is started once,
    because the command may ask for more training. Not retried are a mistake in the command line, a
    job that failed immediately twice, and one whose results cannot be written. Snapshots in the
    hosts' memory are removed at the end, if the disk has their content.

    Args:
        job: the job.
        machine: runs commands and probes hosts.
        max_restarts: how many times to restart the job at most; restarts because its hosts have
            changed do not count.
        changes: decides which hosts of a hosts file it is on; None without such a file.

    Returns:
        The exit code: 0 if the job has finished, 128 + n after signal n, 2 after a usage error, 74
        if the results cannot be written, else mpirun's last one, or 1 instead of its 0.

    Raises:
        UserError: the command cannot be started.
    """
    code = 1
    if changes is None:
        supervisor = _Supervisor(job, machine, max_restarts + 1)
    else:
        supervisor = _ElasticSupervisor(job, machine, max_restarts + 1, changes)
    try:
        code = supervisor.run()
    finally:
        supervisor.close(code)
    return code


class _Supervisor:
    """The state between the starts of one job, whose hosts stay the same unless they are lost."""

    def __init__(self, job: Job, machine: Machine, max_starts: int) -> None:
        self._job, self._machine, self._max_starts = job, machine, max_starts
        self._before = read_state(job.folder)
        self._lost: frozenset[str] = frozenset()
        self._ever_lost: set[str] = set()
        self._idle = 0  # consecutive starts without progress
        self._quick = 0  # consecutive starts on the same hosts that failed immediately
        self._remote = {host.name: host for host in job.remote}  # all that the job was ever on

    def run(self) -> int:
        number = failures = 1
        while True:
            before = read_state(self._job.folder)
            code = self._start(number, before)
            state = read_state(self._job.folder)
            if self._machine.stopped:
                return self._end_by_signal()
            if state.has_finished_since(before):
                self._machine.report(f"finished after {_count(number, 'start')}")
                return 0
            if code == UserError.exit_code and not state.is_beyond(before) and not self._is_new():
                return code
            if code == StorageError.exit_code:
                self._machine.report(
                    "not started again: the job could not write its results, see above"
                )
                return code
            if not self._is_due_to_hosts(code):
                if failures == self._max_starts or self._quick == _MAX_QUICK:
                    return self._give_up(number, code)
                self._machine.report(f"mpirun ended with code {code}, and the job is not finished")
                failures += 1
            if not self._choose_hosts():
                return self._end_by_signal() if self._machine.stopped else 1
            if self._idle > 1 and not self._machine.stopped:
                self._machine.pause(_PAUSE_SEC)
            if self._machine.stopped:
                return self._end_by_signal()
            number += 1

    def close(self, code: int) -> None:
        """Remove snapshots that are no longer needed from the hosts' memory.

        A run that has finished removes its snapshots itself, as far as it can.
        """
        job, machine = self._job, self._machine
        if not job.owns_snapshots:
            return
        if code and not machine.save_snapshot():
            machine.report(
                f"the newest state is still in memory ({SHM}): make room on the disk, and run "
                f"the same command with --run-dir {job.run_dir} --resume auto "
                f"--snapshots {job.snapshots}"
            )
            return
        hosts = [host for host in self._remote.values() if code or host.name in self._ever_lost]
        if missed := machine.remove_snapshots(hosts):
            machine.report(
                f"{SHM}/kaitian-{job.snapshots}-* may be left on {list_names(sorted(missed))}"
            )

    def _start(self, number: int, before: RunState) -> int:
        """Start the job, wait for its end, and record whether it made progress."""
        hostfile = self._job.folder / f"hostfile-restart-{number - 1}"
        start = self._plan(self._lost, before, hostfile)
        reason = f"{self._name_lost()}; " if self._lost else ""
        self._machine.report(f"start {number} of {self._max_starts}: {reason}{start.shape}")
        return self._run(before, partial(self._machine.run, start.words))

    def _plan(self, left_out: frozenset[str], before: RunState, hostfile: Path) -> Start:
        # Results of an earlier run in the folder were not trained by these starts.
        trained = before.trained and before != self._before
        start = plan_start(self._job, left_out, trained, str(hostfile))
        if start.hostfile:
            try:
                hostfile.parent.mkdir(parents=True, exist_ok=True)
                hostfile.write_text(start.hostfile)
            except OSError as error:
                raise UserError(
                    f"{hostfile}: {error.strerror}; name a --run-dir that can be written"
                ) from error
        return start

    def _run(self, before: RunState, run: Callable[[], int]) -> int:
        began = self._machine.now()
        code = run()
        seconds = self._machine.now() - began
        is_idle = not read_state(self._job.folder).is_beyond(before)
        self._idle = self._idle + 1 if is_idle else 0
        self._quick = self._quick + 1 if is_idle and seconds < _QUICK_SEC else 0
        return code

    def _is_new(self) -> bool:
        """Return whether the job was started on hosts on which it has not trained before."""
        return False

    def _is_due_to_hosts(self, code: int) -> bool:
        """Return whether the job has ended because its hosts change, not by its own failure."""
        return False

    def _choose_hosts(self) -> bool:
        """Choose the next start's hosts; return whether there are any."""
        if not self._job.remote:
            return True
        before = self._lost
        # All of them, including lost ones, which may be back.
        self._lost = self._machine.lost(self._job.remote)
        self._ever_lost |= self._lost
        if self._lost != before:
            self._quick = 0  # the next start uses other hosts
        if self._lost and not self._job.left(self._lost):
            self._machine.report(f"{self._name_lost()}; no host is left")
            return False
        return True

    def _name_lost(self) -> str:
        names = [host.name for host in self._job.hosts if host.name in self._lost]
        if len(names) == 1:
            return f"host {names[0]} does not answer"
        return f"hosts {list_names(names)} do not answer"

    def _give_up(self, number: int, code: int) -> int:
        is_quick = self._quick == _MAX_QUICK
        reason = " (the last two failed immediately, on the same hosts)" if is_quick else ""
        self._machine.report(
            f"gave up after {_count(number, 'start')}{reason}; mpirun's last exit code was {code}"
        )
        return code or 1

    def _end_by_signal(self) -> int:
        number = self._machine.stopped
        self._machine.report(f"ended by {signal.Signals(number).name}; not started again")
        return 128 + number


class _ElasticSupervisor(_Supervisor):
    """The same with a hosts file: a running job is started again on other hosts."""

    def __init__(self, job: Job, machine: Machine, max_starts: int, changes: HostChanges) -> None:
        super().__init__(job, machine, max_starts)
        self._changes = changes
        self._trained_on: set[str] | None = None  # the hosts of the last start that trained
        self._joined: list[Host] = []
        self._placed: list[str] = []  # each rank's host in this start
        self._seen = self._before
        self._is_asked = self._has_moved = False
        self._look_at = 0.0

    def close(self, code: int) -> None:
        self._changes.close()
        self._machine.withdraw_request()
        super().close(code)

    def _start(self, number: int, before: RunState) -> int:
        machine, changes = self._machine, self._changes
        hostfile = self._job.folder / f"hostfile-start-{number}"
        start = self._plan(changes.left_out, before, hostfile)
        machine.withdraw_request()
        machine.report(f"start {number}: {start.shape}")
        changes.begin()
        hosts = {host.name for host in changes.wanted}
        self._placed = place_by_slot(changes.wanted, total_slots(changes.wanted) or 0)
        self._is_asked, self._seen = False, before
        watch = partial(self._watch, before)
        code = self._run(before, partial(machine.run, start.words, watch))
        # mpirun's code is not 0 if a rank was lost earlier, which the job has survived.
        was_refused = machine.withdraw_request()
        self._has_moved = self._is_asked and (code == 0 or not was_refused)
        if read_state(self._job.folder).is_beyond(before):
            self._trained_on, self._joined = hosts, []
        return code

    def _watch(self, before: RunState) -> None:
        """Ask the running job to save and end if it should be started again on other hosts.

        Not while it starts: it has no step to save yet.
        """
        machine, changes, now = self._machine, self._changes, self._machine.now()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SEC
        if machine.take_hangup():
            changes.read_again()
        state = read_state(self._job.folder)
        if not self._job.spares:  # else a spare has taken the lost rank's place
            self._lose_hosts_of(state.lost_ranks_since(self._seen), now)
        self._seen = state
        if changes.poll(now) and not self._is_asked and state.is_beyond(before):
            names = list_names([host.name for host in changes.wanted])
            machine.report(f"asking the job to save and end, to start it again on {names}")
            self._is_asked = True
            machine.request_restart()

    def _lose_hosts_of(self, lost: Collection[int], now: float) -> None:
        """Record the hosts of ranks without which the job continues."""
        ranks_of: dict[str, list[str]] = {}
        for rank in sorted(lost):
            if rank < len(self._placed):
                ranks_of.setdefault(self._placed[rank], []).append(str(rank))
        for host, ranks in ranks_of.items():
            plural = "s" if len(ranks) > 1 else ""
            self._changes.lose([host], now, f"has lost rank{plural} {list_names(ranks)}")

    def _is_new(self) -> bool:
        return bool(self._joined)

    def _is_due_to_hosts(self, code: int) -> bool:
        if not (self._has_moved or self._joined):
            return False
        if self._joined:  # hosts on which it has never trained are held back
            names = [host.name for host in self._joined]
            why = f"joined, and the job ended with code {code} before its next step"
            self._changes.lose(names, self._machine.now(), why)
        self._idle = self._quick = 0
        return True

    def _choose_hosts(self) -> bool:
        machine, changes = self._machine, self._changes
        self._job = self._job.with_hosts(changes.entries)
        remote = {host.name for host in self._job.remote}
        lost = machine.lost([host for host in changes.wanted if host.name in remote])
        changes.lose(lost, machine.now(), "does not answer")
        wanted = changes.wanted
        machine.job = self._job
        self._ever_lost |= self._remote.keys() - {host.name for host in wanted}
        self._remote |= {host.name: host for host in self._job.remote}
        if not wanted:
            machine.report("no host is left")
            return False
        if self._trained_on is not None:
            self._trained_on -= changes.left_out  # if they come back, they join
        self._joined = joined_hosts(wanted, self._trained_on)
        if stale := [host for host in self._joined if host.name in remote]:
            machine.remove_stale_snapshots(stale)
        return True


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
