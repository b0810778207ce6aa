"""The checks that run before every job, because their facts cost nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kaitian_mpi.devices.choice import LIBRARY_VARIABLE
from kaitian_mpi.preflight.facts import SHM, JobFacts, RankFacts
from kaitian_mpi.preflight.verdict import (
    Verdict,
    by_value,
    count_text,
    differ,
    merge_hosts,
    ok,
    problem,
    problem_if,
    ranks_text,
    size_text,
    warning,
)

Check = Callable[[JobFacts], Iterable[Verdict]]
"""A pure function of facts, without a verdict if its facts are missing."""

_SHM_OF_MPI = 16 << 20  # requested by Open MPI (btl_sm_segment_size)
_SHM_TO_SPARE = 256 << 20
_FILES_PER_RANK = 2
_OWN_FILES = 256  # libraries, pipes, a dataset's files

_MORE_SHM = (
    f"make room in {SHM}, or give the container more (docker run --shm-size=8g): MPI, --workers "
    "and kaitian-supervise keep data there"
)
_MORE_FILES = "raise it for the launcher too, such as `ulimit -n 65536` or in limits.conf"


def check_versions(job: JobFacts) -> Iterator[Verdict]:
    """Check that the ranks have the same kaitian-mpi, wire protocol and MPI."""
    versions = {facts.rank: facts.software.packages.get("kaitian-mpi", "") for facts in job.ranks}
    compared = {
        "version": {rank: version for rank, version in versions.items() if version},
        "wire protocol": {facts.rank: str(facts.software.protocol) for facts in job.ranks},
    }
    for name, values in compared.items():
        if differ(values):
            yield problem(
                f"the {name} of kaitian-mpi differs between ranks: {by_value(values)}",
                "install the same version on every host",
            )
    libraries = {facts.rank: facts.mpi.library for facts in job.ranks if facts.mpi is not None}
    if differ(libraries):
        yield warning(
            f"the MPI library differs between ranks: {by_value(libraries)}",
            "install the same library on every host: different releases may be incompatible",
        )


def check_shared_memory(job: JobFacts) -> Iterator[Verdict]:
    """Check that shared memory is large enough for MPI and for data-loading processes."""
    for host, ranks in job.hosts.items():
        free = ranks[0].machine.shm_free_bytes
        size = ranks[0].machine.shm_bytes
        if free is None or size is None:
            advice = "mount one: MPI is slower without, and --workers and kaitian-supervise need it"
            yield warning(f"no {SHM}", advice, host)
            continue
        text = f"{SHM}: {size_text(free)} of {size_text(size)} free"
        # Under a launcher, MPI has already allocated its memory.
        if free < _SHM_TO_SPARE:
            is_bad = free < _SHM_OF_MPI and job.mpirun is not None
            yield problem_if(is_bad, text, _MORE_SHM, host)
        else:
            yield ok(text, host)


def count_cores(ranks: Iterable[RankFacts]) -> int:
    """Return the number of cores that some ranks of one host may run on together."""
    return len(frozenset().union(*(facts.machine.cores for facts in ranks)))


def check_binding(job: JobFacts) -> Iterator[Verdict]:
    """Check that mpirun lets its ranks use all cores; by default, it binds each of two ranks."""
    for host, ranks in job.hosts.items():
        cores = count_cores(ranks)
        most = max(facts.machine.launcher_cores for facts in ranks)
        if cores < most and any(facts.mpi and not facts.mpi.by_srun for facts in ranks):
            text = f"mpirun lets {count_text(len(ranks), 'rank')} use {cores} of {most} cores"
            yield warning(text, "add --bind-to none to the command", host)


def check_limits(job: JobFacts) -> Iterator[Verdict]:
    """Check that the ranks may open as many files and connections as they need."""
    size = max([len(job.ranks) + len(job.missing), *(f.mpi.size for f in job.ranks if f.mpi)])
    needed = _OWN_FILES + _FILES_PER_RANK * size
    for host, ranks in job.hosts.items():
        limited = [f.machine.open_files for f in ranks if f.machine.open_files >= 0]
        if limited and min(limited) < needed:
            text = f"{min(limited):,} open files, a job of {count_text(size, 'rank')} may need"
            yield warning(f"{text} {needed:,}", _MORE_FILES, host)
        else:
            yield ok(f"{f'{min(limited):,}' if limited else 'any number of'} open files", host)


def check_libraries(libraries: Iterable[str], declining: Sequence[int]) -> Iterator[Verdict]:
    """Warn that no rank uses a vendor's library because a rank declines it.

    Args:
        libraries: those of the ranks' devices; "" for a device without one.
        declining: the ranks with `--no-vendor-library`, or its variable.
    """
    if declining and (names := sorted({*libraries} - {""})):
        yield warning(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not used, by "
            f"--no-vendor-library or {LIBRARY_VARIABLE}=0 on {ranks_text(declining)}: groups "
            "communicate through host memory, which is slower",
            "omit it to use the vendor's library again",
        )


BEFORE_JOBS: Mapping[str, Check] = {
    "versions": check_versions,
    "shared memory": check_shared_memory,
    "binding": check_binding,
    "limits": check_limits,
}


def run_checks(
    job: JobFacts, checks: Mapping[str, Check] = BEFORE_JOBS
) -> Iterator[tuple[str, Verdict]]:
    """Yield the name and the verdicts of each check, in order."""
    for name, check in checks.items():
        for verdict in merge_hosts(check(job), len(job.hosts)):
            yield name, verdict
