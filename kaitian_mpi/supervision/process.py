"""mpirun as a child process, and the signals that the supervisor receives meanwhile."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from kaitian_mpi.checkpoint.folder_lock import wait_for_writer
from kaitian_mpi.errors import UserError
from kaitian_mpi.output.folders import MEMORY
from kaitian_mpi.supervision.hosts import Host
from kaitian_mpi.supervision.job_marks import environment, ranks_live_on, remove_snapshots
from kaitian_mpi.supervision.local_ranks import has_local_ranks
from kaitian_mpi.supervision.probe import lost_hosts
from kaitian_mpi.supervision.starts import Job, list_names

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGINT, signal.SIGTERM)
# Open MPI's mpirun asks a silent host after 3 s, and gives it up after 3 s more without an answer;
# its own default is 8 minutes. What the user has set stays.
_NOTICE_DEAD_HOSTS = {
    "PRTE_MCA_oob_tcp_keepalive_time": "3",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "1",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}
_PASSED_ON = (*_STOPS, signal.SIGUSR1)
_POLL_SEC = 0.1
_LOOK_SEC = 0.5
_GRACE_SEC = 2.0
_MOST_PATIENCE_SEC = 60.0
_BATCH_SYSTEMS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")


class Machine:
    """The effects of a supervisor: it runs commands, waits, probes hosts and logs.

    As a context manager it handles signals: SIGINT and SIGTERM are passed on to the running
    command and remembered in `stopped`, SIGUSR1 is passed on.
    """

    def __init__(self, job: Job, agent: Sequence[str], probe_sec: float, hang_sec: float) -> None:
        """Do nothing yet.

        Args:
            job: whose ranks are marked, and whose hosts are asked.
            agent: as `probe.find_agent`.
            probe_sec: how long a host's answer may take.
            hang_sec: how long mpirun may go on after its ranks on this machine, if there are none
                on others; 0 for ever.
        """
        self.stopped = 0
        """The signal that asked to stop; 0 for none."""
        self._job = job
        self._agent = agent
        self._probe_sec = probe_sec
        self._hang_sec = hang_sec
        self._child: subprocess.Popen[bytes] | None = None
        self._said_living = False
        self._missed = 0  # a signal to stop from while there was no child
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Machine:
        """Install the handlers, except for signals that our parent has set to be ignored."""
        for number in _PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, words: Sequence[str]) -> int:
        """Run a command to its end and return its exit code, 128 + n after signal n.

        It gets a process group of its own, so that a Ctrl-C reaches it once, from us: Open MPI
        takes a second one as the wish to drop everything. It would have no say over the terminal
        in there, so its stdin is empty.

        Raises:
            UserError: it cannot be started.
        """
        libc = ctypes.CDLL(None)
        parent = os.getpid()

        def die_with_parent() -> None:
            # Only the child itself can ask for this, between fork and exec, hence the hook; it is
            # safe in a process without threads. After a SIGKILL to us mpirun ends its ranks.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)

        try:
            self._child = subprocess.Popen(  # noqa: S603 (the user's own command)
                words,
                env={**_NOTICE_DEAD_HOSTS, **os.environ, **environment(self._job)},
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise UserError(
                f"{words[0]}: {error.strerror}; name a program that can be started"
            ) from error
        if self._missed:
            self._child.send_signal(self._missed)
        code = self._wait(self._child)
        self._child = None
        if self.stopped:  # the process that saves the last step may outlive mpirun
            wait_for_writer(self._job.folder / "checkpoints")
        return code if code >= 0 else 128 - code

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the command's end; end it where it hangs.

        When the link to a host is down, mpirun waits for that host even after all its other ranks
        have ended, and after a SIGTERM as well. It can be seen only where ranks run beside mpirun.
        A job that lives on without those is left alone.
        """
        patience, alive_at = self._hang_sec, None
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_LOOK_SEC)
            if has_local_ranks(child.pid):
                alive_at = time.monotonic()
            elif patience and alive_at and time.monotonic() - alive_at > patience:
                if not self._lives_elsewhere():
                    return self._end_hanging(child)
                alive_at, patience = time.monotonic(), min(2 * patience, _MOST_PATIENCE_SEC)

    def _lives_elsewhere(self) -> bool:
        """Return whether ranks on other hosts continue without those of this machine."""
        job = self._job
        if not job.survives:
            return False
        if not job.hosts and any(name in os.environ for name in _BATCH_SYSTEMS):
            return True  # only the batch system knows the hosts
        living = ranks_live_on(self._agent, job.remote, job, self._probe_sec)
        if living and not self._said_living:
            self._said_living = True
            names = list_names(sorted(living))
            self.say(f"no rank is left on this machine; the job continues on {names}")
        return bool(living)

    def _end_hanging(self, child: subprocess.Popen[bytes]) -> int:
        self.say(
            "mpirun is still waiting after its ranks on this machine have ended; terminating it"
        )
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            return child.wait(_GRACE_SEC)
        child.kill()
        return child.wait()

    def save_snapshot(self) -> bool:
        """Write this machine's snapshot to disk, if it is newer than the checkpoints there.

        Returns:
            Whether nothing is in memory that the disk has not.
        """
        if not any(MEMORY.glob(f"kaitian-{self._job.snapshots}-*")):
            return True
        from kaitian_mpi.checkpoint.last_snapshot import save_snapshot  # loads torch, for seconds

        try:
            return save_snapshot(self._job.snapshots, self._job.folder, self._job.keep_checkpoints)
        except (OSError, UserError) as error:
            self.say(f"the snapshot in memory could not be written to disk: {error}")
            return False

    def remove_snapshots(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Remove the job's snapshots; return the names of the hosts that do not answer."""
        return remove_snapshots(self._agent, hosts, self._job, self._probe_sec)

    def pause(self, seconds: float) -> None:
        """Wait, but not for longer than until a signal asks to stop."""
        ends_at = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < ends_at:
            time.sleep(_POLL_SEC)

    def now(self) -> float:
        """Return the seconds of a clock that only goes forward."""
        return time.monotonic()

    def lost(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Return the names of the hosts that do not answer."""
        return lost_hosts(self._agent, hosts, self._probe_sec)

    def say(self, text: str) -> None:
        """Log a line."""
        _log.info("%s", text)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in _STOPS:
            self.stopped = self.stopped or number
        if self._child is not None:
            self._child.send_signal(number)
        elif number in _STOPS:
            self._missed = number
