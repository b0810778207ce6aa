"""Verdicts on hosts: cores, memory, shared memory and limits."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.verdict import Verdict, count_text, ok, problem, size_text, warning

SHM = "/dev/shm"  # noqa: S108  # nothing is written there
_RAM_PER_RANK = 1 << 30
_MIN_RAM_PER_RANK = 256 << 20  # what a rank takes before it has a model
_SHM_OF_MPI = 16 << 20  # what Open MPI asks for (btl_sm_segment_size)
_SHM_TO_SPARE = 256 << 20
_FILES_PER_RANK = 2
_OWN_FILES = 256  # libraries, pipes, a dataset's files

_MORE_SHM = (
    f"make room in {SHM}, or give the container more (docker run --shm-size=8g): MPI, --workers "
    "and kaitian-supervise keep data there"
)
_MORE_FILES = "raise it for the launcher too, such as `ulimit -n 65536` or in limits.conf"


def judge_cores(job: JobFacts) -> Iterator[Verdict]:
    """No host has more ranks on its CPU than cores."""
    for host, ranks in job.hosts.items():
        on_cpu = [r for r in ranks if r.devices is None or r.devices.is_host]
        cores = max(facts.machine.cores for facts in ranks)
        found = f"{count_text(cores, 'core')} for {count_text(len(ranks), 'rank')}"
        if len(ranks) == ranks[0].local_size and len(on_cpu) > cores:
            yield warning(found, "fewer ranks there train as fast", host)
        else:
            yield ok(found if job.launcher is None else count_text(cores, "core"), host)


def judge_ram(job: JobFacts) -> Iterator[Verdict]:
    """Every host has memory for its ranks."""
    for host, ranks in job.hosts.items():
        known = [facts.devices for facts in ranks if facts.devices is not None]
        if not known:
            continue
        free = min(devices.ram_free_bytes for devices in known)
        found = f"{size_text(free)} of {size_text(known[0].ram_bytes)} free"
        shared = f"{found} for {count_text(len(ranks), 'rank')}"
        each = free / len(ranks)
        if each < _MIN_RAM_PER_RANK:
            yield problem(shared, "free memory, or start fewer", host)
        elif each < _RAM_PER_RANK:
            advice = "a large model or dataset may not fit; free memory, or start fewer ranks"
            yield warning(shared, advice, host)
        else:
            yield ok(found, host)


def judge_shared_memory(job: JobFacts) -> Iterator[Verdict]:
    """Shared memory is large enough for MPI and for data-loading processes."""
    for host, ranks in job.hosts.items():
        free, size = ranks[0].machine.shm_free_bytes, ranks[0].machine.shm_bytes
        if free is None or size is None:
            advice = "mount one: MPI is slower without, and --workers and kaitian-supervise need it"
            yield warning(f"no {SHM}", advice, host)
            continue
        found = f"{SHM}: {size_text(free)} of {size_text(size)} free"
        # Under a launcher MPI has taken its part already.
        if free < _SHM_OF_MPI and job.launcher is not None:
            yield problem(found, _MORE_SHM, host)
        elif free < _SHM_TO_SPARE:
            yield warning(found, _MORE_SHM, host)
        else:
            yield ok(found, host)


def judge_limits(job: JobFacts) -> Iterator[Verdict]:
    """The ranks may open as many files and connections, and lock as much memory, as is needed."""
    size = max([len(job.ranks) + len(job.missing), *(f.mpi.size for f in job.ranks if f.mpi)])
    needed = _OWN_FILES + _FILES_PER_RANK * size
    for host, ranks in job.hosts.items():
        limited = [f.machine.open_files for f in ranks if f.machine.open_files >= 0]
        if limited and min(limited) < needed:
            found = f"{min(limited):,} open files, a job of {count_text(size, 'rank')} may need"
            yield warning(f"{found} {needed:,}", _MORE_FILES, host)
        else:
            yield ok(f"{f'{min(limited):,}' if limited else 'any number of'} open files", host)
    for host, ranks in job.hosts.items():
        devices, locked = ranks[0].devices, ranks[0].machine.locked_memory_bytes
        fabrics = [n for n in (devices.interconnects if devices else ()) if n.startswith("rdma ")]
        if fabrics and locked >= 0:
            yield warning(
                f"{size_text(locked)} may be locked, and there is {fabrics[0]}",
                "set `ulimit -l unlimited` for the launcher too: InfiniBand needs locked memory",
                host,
            )
