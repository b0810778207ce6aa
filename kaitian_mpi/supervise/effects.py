"""What a supervisor does to the world around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.supervise.starts import Job


class Effects(Protocol):
    """The supervisor's side effects; `process.Machine` is the real implementation."""

    stopped: int
    """The signal that requested a stop; 0 for none."""

    def run(self, words: Sequence[str], watch: Callable[[], None] = ...) -> int:
        """Run a command to its end and return its exit code; call `watch` often meanwhile."""
        ...

    def adopt(self, job: Job) -> None:
        """Go on with other hosts of the same job."""
        ...

    def request_restart(self) -> bool:
        """Ask the running job to save and end; return whether that could be done."""
        ...

    def withdraw_request(self) -> bool:
        """Ask the job no longer; return whether it had not done what it was asked for."""
        ...

    def take_hangup(self) -> bool:
        """Return whether a SIGHUP has arrived since the last call."""
        ...

    def remove_stale_snapshots(self, hosts: Sequence[Host]) -> None:
        """Remove what hosts have kept of the job while it went on without them."""
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
