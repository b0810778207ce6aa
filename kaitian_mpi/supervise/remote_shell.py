"""Runs short commands on a job's other hosts, by mpirun's own remote agent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from kaitian_mpi.preflight.limited_process import run_all
from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.runtime.mpi_libraries import IN_ALLOCATIONS
from kaitian_mpi.supervise.hosts import Host
from kaitian_mpi.supervise.remote_hosts import NO_ANSWER, probe_command


@dataclass(frozen=True)
class RemoteShell:
    """Runs commands on hosts, on all of them at once."""

    agent: Sequence[str]
    """The command that mpirun uses to reach hosts, such as ssh."""
    limit_sec: float
    """How long a command may take."""

    def run(self, hosts: Sequence[Host], words: Sequence[str]) -> dict[str, int]:
        """Run a command, whose words a remote shell interprets.

        Returns:
            Its exit code by host name, `NO_ANSWER` for a host that cannot be reached in time. Empty
            if there is no agent: then mpirun reaches the hosts in another way.
        """
        if not hosts or shutil.which(self.agent[0]) is None:
            return {}
        commands = {
            host.name: probe_command(self.agent, host, self.limit_sec, words) for host in hosts
        }
        codes = {name: ended.code for name, ended in run_all(commands, self.limit_sec).items()}
        return {name: NO_ANSWER if code is None else code for name, code in codes.items()}

    def lost_hosts(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Return the names of the hosts that do not answer."""
        codes = self.run(hosts, ["true"])
        return frozenset(name for name, code in codes.items() if code)

    def hosts_with_ranks(self, hosts: Sequence[Host], job_id: str) -> frozenset[str] | None:
        """Return the names of the hosts that answer and have a rank of a job.

        None if that is unknown: there is no agent, or, in an allocation, no host answers. There,
        mpirun may reach hosts by the batch system.
        """
        codes = self.run(hosts, ["grep", "-qs", f"{SUPERVISED}={job_id}", "/proc/[0-9]*/environ"])
        has_answer = any(code != NO_ANSWER for code in codes.values())
        if hosts and not has_answer and (not codes or is_in_allocation()):
            return None
        return frozenset(name for name, code in codes.items() if code == 0)


def is_in_allocation() -> bool:
    """Return whether this process is in an allocation of a batch system."""
    return any(name in os.environ for name in IN_ALLOCATIONS)
