"""The list of checks: all are made by `kaitian-doctor`, the cheap ones before every job."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.preflight import host_checks as of_hosts
from kaitian_mpi.preflight import rank_checks as of_ranks
from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.verdict import Judge, Verdict, merge_hosts

CHECKS: dict[str, Judge] = {
    "ranks": of_ranks.judge_presence,
    "examination": of_ranks.judge_faults,
    "software": of_ranks.judge_software,
    "versions": of_ranks.judge_versions,
    "mpi": of_ranks.judge_mpi,
    "placement": of_ranks.judge_placement,
    "mpirun": of_ranks.judge_launcher,
    "survival": of_ranks.judge_survival,
    "devices": of_hosts.judge_devices,
    "drivers": of_hosts.judge_drivers,
    "vendor packages": of_hosts.judge_vendor_packages,
    "cores": of_hosts.judge_cores,
    "memory": of_hosts.judge_ram,
    "shared memory": of_hosts.judge_shared_memory,
    "limits": of_hosts.judge_limits,
    "run folder": of_hosts.judge_storage,
    "links": of_ranks.judge_links,
}
BEFORE_JOBS = ("versions", "placement", "shared memory", "limits")
"""Those whose facts cost nothing, so that they are made before every job."""


def judge(job: JobFacts, *, before_job: bool = False) -> Iterator[tuple[str, Verdict]]:
    """Make the checks, in their order; return their names and verdicts."""
    for name in BEFORE_JOBS if before_job else CHECKS:
        for verdict in merge_hosts(CHECKS[name](job), len(job.hosts)):
            yield name, verdict
