"""Runs a job's mpirun as a child process, to which it forwards signals, and ends it if it hangs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe import folders
from kaitian_mpi.observe.files import read_last_lines
from kaitian_mpi.observe.folder_lock import collection_progress, is_saving_in, wait_for_save
from kaitian_mpi.preflight.verdict import list_names
from kaitian_mpi.runtime.launcher import SUPERVISED, SUPERVISED_FOLDER
from kaitian_mpi.runtime.mpi_libraries import LIBRARIES, NOTICE_DEAD_HOSTS
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.runtime.system import die_with_parent
from kaitian_mpi.supervise.mpirun_command import TRAIN
from kaitian_mpi.supervise.remote_shell import RemoteShell, is_in_allocation
from kaitian_mpi.supervise.starts import JobCommand

_log = logging.getLogger(__name__)

_STOPS = (signal.SIGINT, signal.SIGTERM)
_HANDLED = (*_STOPS, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SEC = 0.1
_CHECK_SEC = 0.5
_GRACE_SEC = 2.0
# A request is seen after a step and agreed on after the next one. Then parts are collected, each
# piece within the same time.
_SAVE_SEC = 60.0
_SAVE_STEPS = 4
_END_SEC = 20.0  # from the end of a checkpoint to that of mpirun
_MAX_HANG_SEC = 60.0
_RANK_VARIABLES = frozenset(library.rank_variables[0] for library in LIBRARIES)


class JobRunner:
    """Runs a job's commands, one after the other, for a supervisor.

    As a context manager it handles signals: SIGINT and SIGTERM are recorded in `stopped` and
    forwarded to the running command. If the state may be divided over the ranks, they first get
    time to save it, until a second signal. SIGUSR2 is recorded as well, and asks the job to save
    and end. SIGUSR1 is forwarded.
    """

    def __init__(self, job: JobCommand, shell: RemoteShell, hang_sec: float) -> None:
        """Run nothing yet.

        Args:
            job: the job whose commands are run.
            shell: asks the other hosts whether the job continues there.
            hang_sec: how long mpirun may keep running after its ranks on this machine have ended;
                with fault tolerance, unless other hosts still have ranks; 0 for no limit.
        """
        self.job = job
        self.stopped = 0
        """The signal that requested a stop; 0 for none."""
        self.has_saved = False
        """Whether the job has ended as SIGUSR2 asked it to: its state is saved."""
        self._shell = shell
        self._hang_sec = hang_sec
        self._child: subprocess.Popen[bytes] | None = None
        self._reported_remote = self._reported_saving = False
        self._missed = 0  # a stop signal received while there was no child
        self._is_asked = False  # whether SIGUSR2 has asked the job to save and end
        self._stop_at = float("inf")  # when the stop signal is forwarded
        self._save_limit_sec = 0.0  # how long the job may take to begin to save, or for a piece
        self._collected: int | None = None  # the last progress seen of a collection
        self._before: dict[int, Any] = {}

    def replace_job(self, job: JobCommand) -> None:
        """Run a job on other hosts from now on, as a hosts file asks."""
        self.job = job

    def __enter__(self) -> JobRunner:
        """Install the handlers, except for stop signals that are ignored already."""
        for number in _HANDLED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._forward)
        # If it is inherited as ignored, the kernel does not keep mpirun's exit code.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, words: Sequence[str], watch: Callable[[], None] = lambda: None) -> int:
        """Run a command to its end and return its exit code, 128 + n after signal n.

        The command has its own process group, so that it receives a Ctrl-C only once, from this
        process: after a second one, Open MPI ends at once. It cannot read from the terminal there,
        so its stdin is empty.
        """
        self._child = child = self._start(words)
        if self._missed:
            self._stop(child, self._missed)
        code = self._wait(child, watch)
        self._child = None
        if self.stopped:
            is_open = self.withdraw_request()
            self.has_saved = self._is_asked and not is_open
            # The process that saves the last step may outlive mpirun.
            wait_for_save(self.job.folder / "checkpoints")
        return code if code >= 0 else 128 - code

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(  # noqa: S603 (the user's own command)
                words,
                env={**NOTICE_DEAD_HOSTS, **os.environ, **environment(self.job)},
                stdin=subprocess.DEVNULL,
                process_group=0,
                # After a SIGKILL to this process, mpirun still ends its ranks. Safe without
                # threads.
                preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
            )
        except OSError as error:
            raise UserError(
                f"{words[0]}: {error.strerror}; name a program that can be started"
            ) from error

    def _wait(self, child: subprocess.Popen[bytes], watch: Callable[[], None]) -> int:
        """Wait for the command to end; end it if it hangs.

        When the link to a host is down, mpirun waits for that host even after all its other ranks
        have ended, and even after a SIGTERM. This can be detected only if mpirun has ranks on its
        own machine. A job that continues without those is not ended.
        """
        limit_sec = self._hang_sec
        alive_at = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_CHECK_SEC)
            watch()
            if time.monotonic() >= self._stop_at:
                self._stop_at = self._terminate_unless_saving(child)
            if has_local_ranks(child.pid):
                alive_at = time.monotonic()
            elif limit_sec and alive_at and time.monotonic() - alive_at > limit_sec:
                if not self._continues_elsewhere():
                    return self._end_hanging(child, limit_sec)
                alive_at = time.monotonic()
                limit_sec = min(2 * limit_sec, _MAX_HANG_SEC)

    def _terminate_unless_saving(self, child: subprocess.Popen[bytes]) -> float:
        """Forward the stop signal if no checkpoint is being saved; return when to try again.

        A write is waited for however long it takes; a collection of the state while it advances:
        a rank that hangs would hold it up forever.
        """
        folder = self.job.folder / "checkpoints"
        if is_saving_in(folder):
            wait_sec = _END_SEC
        elif self._collects_more(folder):
            wait_sec = self._save_limit_sec
        else:
            self.report(
                "the job has not saved in time; terminating it (the last checkpoint is kept)"
            )
            child.send_signal(self.stopped)
            return float("inf")
        if not self._reported_saving:
            self._reported_saving = True
            self.report("the job is saving a checkpoint; a second signal ends it at once")
        return time.monotonic() + wait_sec

    def _collects_more(self, folder: Path) -> bool:
        """Return whether a state is being collected, more of it than when last asked."""
        before = self._collected
        self._collected = collection_progress(folder)
        return self._collected is not None and self._collected != before

    def _continues_elsewhere(self) -> bool:
        """Return whether ranks on other hosts continue without those on this machine.

        They may if that is unknown: a job that trains must not be ended.
        """
        job = self.job
        if not job.survives:
            return False
        if not job.hosts and is_in_allocation():
            return True  # only the batch system knows the hosts
        hosts = self._shell.hosts_with_ranks(job.remote, job.job_id)
        if hosts is None:
            return True
        if hosts and not self._reported_remote:
            self._reported_remote = True
            names = list_names(sorted(hosts))
            self.report(f"no rank is left on this machine; the job continues on {names}")
        return bool(hosts)

    def _end_hanging(self, child: subprocess.Popen[bytes], limit_sec: float) -> int:
        self.report(
            f"mpirun is still waiting {limit_sec:g} s after its ranks on this machine have ended "
            "(--hang-seconds); terminating it"
        )
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            return child.wait(_GRACE_SEC)
        child.kill()
        return child.wait()

    def request_restart(self) -> bool:
        """Ask the running job to save and end; return whether it can be asked."""
        try:
            folders.request_restart(self.job.folder, self.job.job_id)
        except OSError as error:
            self.report(
                f"{self.job.folder}: {error.strerror}; could not ask the job to save and end"
            )
            return False
        return True

    def withdraw_request(self) -> bool:
        """Withdraw the request; return whether the job had not fulfilled it."""
        return folders.withdraw_request(self.job.folder)

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, or until a signal requests a stop."""
        wait_until(lambda: bool(self.stopped), seconds, _POLL_SEC)

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        return time.monotonic()

    def report(self, text: str) -> None:
        """Log a line."""
        _log.info("%s", text)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        child = self._child
        if number == signal.SIGUSR1:
            if child is not None:
                child.send_signal(number)
            return
        is_first = self.stopped not in (*_STOPS, number)
        if is_first:
            self.stopped = number
        if child is None:
            self._missed = self.stopped
        elif is_first and number in _STOPS and self._has_divided_state():
            self._save_limit_sec = _SAVE_SEC + _SAVE_STEPS * self._step_sec()
            self._stop_at = time.monotonic() + self._save_limit_sec
            self.report(
                f"asking the job to save and end, within {self._save_limit_sec:.0f} s or once it "
                "has written a checkpoint; a second signal ends it at once"
            )
            self.request_restart()
        else:
            self._stop(child, number)

    def _stop(self, child: subprocess.Popen[bytes], number: int) -> None:
        """Forward a stop signal; in place of SIGUSR2, make a request that kaitian-train follows.

        It tells later whether the state was saved, and is not lost if a rank is still starting, or
        if mpirun does not forward the signal.
        """
        can_ask = number == signal.SIGUSR2 and self.job.command.program == TRAIN
        if can_ask and not self._is_asked:
            self._is_asked = self.request_restart()
            if self._is_asked:
                self.report("asking the job to save and end")
        if not (can_ask and self._is_asked):
            child.send_signal(number)

    def _step_sec(self) -> float:
        """Return how long the job's last measured steps took; 0 if that is unknown."""
        lines = read_last_lines(self.job.folder / "metrics.jsonl")
        times = [line["step_time_sec"] for line in lines if line.get("step_time_sec")]
        return times[-1] if times else 0.0

    def _has_divided_state(self) -> bool:
        """Return whether it may be that only all ranks together can save the steps done so far."""
        job = self.job
        return job.config.may_divide_state and (job.folder / "metrics.jsonl").exists()


def environment(job: JobCommand) -> dict[str, str]:
    """Return the environment variables that identify the job to its ranks on all hosts.

    Unlike a command line, they can be read by this user only. The launcher forwards them by name.
    """
    folder = os.path.abspath(job.folder)
    return {
        folders.SNAPSHOTS_VARIABLE: job.config.snapshots,
        SUPERVISED: job.job_id,
        SUPERVISED_FOLDER: folder,
    }


def has_local_ranks(launcher: int) -> bool:
    """Return whether a process has a rank among its descendants; False if that is not visible."""
    try:
        return any(map(_is_rank, psutil.Process(launcher).children(recursive=True)))
    except psutil.Error:  # it has just exited
        return False


def _is_rank(process: psutil.Process) -> bool:
    try:
        return not _RANK_VARIABLES.isdisjoint(process.environ())
    except (psutil.Error, OSError):  # it has exited, or belongs to another user
        return False
