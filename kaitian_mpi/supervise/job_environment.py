"""Identifies a supervised job's ranks and snapshots, on all hosts.

The identifiers are passed in the environment, which only the user can read, not on a command line.
Their names are such that the launcher forwards them to the ranks on all hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from kaitian_mpi.observe.folders import SHM, SNAPSHOTS_VARIABLE, remove_private
from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.supervise.probe import NO_ANSWER, run_on
from kaitian_mpi.supervise.starts import Job


def environment(job: Job) -> dict[str, str]:
    """Return the environment variables for a job's ranks."""
    return {SNAPSHOTS_VARIABLE: job.snapshots, SUPERVISED: job.job_id}


def hosts_with_ranks(
    agent: Sequence[str], hosts: Sequence[Host], job: Job, seconds: float
) -> frozenset[str]:
    """Return the names of the hosts that answer and have a rank of the job."""
    words = ["grep", "-qs", f"{SUPERVISED}={job.job_id}", "/proc/[0-9]*/environ"]
    codes = run_on(agent, hosts, words, seconds)
    return frozenset(name for name, code in codes.items() if code == 0)


def remove_snapshots(
    agent: Sequence[str], hosts: Sequence[Host], job: Job, seconds: float
) -> frozenset[str]:
    """Remove a job's snapshots from this machine and from hosts.

    Returns:
        The names of the hosts that do not answer.
    """
    for folder in SHM.glob(f"kaitian-{job.snapshots}-*"):
        remove_private(folder)
    words = ["rm", "-rf", f"{SHM}/kaitian-{job.snapshots}-*"]
    codes = run_on(agent, hosts, words, seconds)
    return frozenset(name for name, code in codes.items() if code == NO_ANSWER)


def remove_stale_snapshots(
    agent: Sequence[str], hosts: Sequence[Host], job: Job, seconds: float
) -> None:
    """Remove what each of these hosts has kept of a job that went on without it.

    Only from its own folder, in case several hosts share a memory.
    """
    words = ["rm", "-rf", f'"{SHM}/kaitian-{job.snapshots}-$(hostname)"']
    run_on(agent, hosts, words, seconds)
