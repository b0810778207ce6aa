"""The list of checks: all are made by `kaitian-doctor`, the cheap ones before every job."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.host_checks import (
    judge_copies,
    judge_cores,
    judge_devices,
    judge_limits,
    judge_ram,
    judge_shared_memory,
    judge_storage,
    judge_unusable,
    judge_vendor_packages,
)
from kaitian_mpi.preflight.link_checks import judge_clocks, judge_links, judge_networks
from kaitian_mpi.preflight.rank_checks import (
    judge_environments,
    judge_faults,
    judge_installed,
    judge_launcher,
    judge_mpi,
    judge_mpi_library,
    judge_placement,
    judge_presence,
    judge_survival,
    judge_transports,
    judge_versions,
    judge_waiting,
)
from kaitian_mpi.preflight.verdict import Check, Verdict, merge_hosts

CHECKS = (
    Check("ranks", judge_presence),
    Check("examination", judge_faults),
    Check("software", judge_installed),
    Check("versions", judge_versions, before_jobs=True),
    Check("environments", judge_environments),
    Check("mpi", judge_mpi),
    Check("placement", judge_placement, before_jobs=True),
    Check("mpi library", judge_mpi_library, before_jobs=True),
    Check("mpirun", judge_launcher),
    Check("mpi features", judge_transports),
    Check("survival", judge_survival),
    Check("waiting", judge_waiting),
    Check("devices", judge_devices),
    Check("drivers", judge_unusable),
    Check("vendor packages", judge_vendor_packages),
    Check("copies", judge_copies),
    Check("cores", judge_cores),
    Check("memory", judge_ram),
    Check("shared memory", judge_shared_memory, before_jobs=True),
    Check("limits", judge_limits, before_jobs=True),
    Check("run folder", judge_storage),
    Check("network", judge_networks),
    Check("links", judge_links),
    Check("clocks", judge_clocks),
)


def judge(job: JobFacts, *, before_job: bool = False) -> Iterator[tuple[Check, Verdict]]:
    """Make the checks, in their order.

    Args:
        job: the facts.
        before_job: make the cheap ones only.
    """
    for check in CHECKS:
        if check.before_jobs or not before_job:
            for verdict in merge_hosts(check.judge(job), len(job.hosts)):
                yield check, verdict
