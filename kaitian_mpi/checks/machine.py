"""Verdicts on hosts: cores, memory, shared memory and limits."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.checks.facts import JobFacts
from kaitian_mpi.checks.verdict import Verdict, at, ok, problem, size_text, warning

SHM = "/dev/shm"  # noqa: S108  # nothing is written there
_RAM_PER_RANK = 1 << 30
_MIN_RAM_PER_RANK = 256 << 20  # what a rank takes before it has a model
_SHM_PER_RANK = 16 << 20  # Open MPI's shared-memory segment (btl_sm_segment_size)
_SHM_TO_SPARE = 256 << 20
_FILES_PER_RANK = 2
_OWN_FILES = 256  # libraries, pipes, a dataset's files


def judge_cores(job: JobFacts) -> Iterator[Verdict]:
    """No host has more ranks on its CPU than cores."""
    for host, ranks in job.hosts.items():
        on_cpu = [r for r in ranks if r.devices is None or r.devices.is_host]
        cores = max(facts.machine.cores for facts in ranks)
        if len(ranks) == ranks[0].local_size and len(on_cpu) > cores:
            yield warning(
                f"{len(on_cpu)} ranks compute on {cores} cores{at(job, host)}",
                "fewer ranks there train as fast",
            )
        else:
            yield ok(f"{cores} cores for {_count(len(ranks), 'rank')}{at(job, host)}")


def judge_ram(job: JobFacts) -> Iterator[Verdict]:
    """Every host has memory for its ranks."""
    for host, ranks in job.hosts.items():
        known = [facts.devices for facts in ranks if facts.devices is not None]
        if not known:
            continue
        free = min(devices.ram_free_bytes for devices in known)
        found = f"{size_text(free)} of {size_text(known[0].ram_bytes)} free{at(job, host)}"
        each = free / len(ranks)
        if each < _MIN_RAM_PER_RANK:
            yield problem(
                f"{found} for {_count(len(ranks), 'rank')}", "free memory, or start fewer"
            )
        elif each < _RAM_PER_RANK:
            yield warning(
                f"{found} for {_count(len(ranks), 'rank')}",
                "a large model or dataset may not fit; free memory, or start fewer ranks",
            )
        else:
            yield ok(found)


def judge_shared_memory(job: JobFacts) -> Iterator[Verdict]:
    """Shared memory is large enough for MPI and for data-loading processes."""
    for host, ranks in job.hosts.items():
        free, size = ranks[0].machine.shm_free_bytes, ranks[0].machine.shm_bytes
        if free is None or size is None:
            yield warning(
                f"no {SHM}{at(job, host)}",
                "mount one: MPI is slower without, and --workers and kaitian-supervise need it",
            )
            continue
        found = f"{SHM}: {size_text(free)} of {size_text(size)} free{at(job, host)}"
        # Under a launcher MPI has taken its part already.
        needed = 0 if ranks[0].mpi and ranks[0].mpi.size > 1 else 2 * _SHM_PER_RANK
        if free < needed:
            yield problem(found, _MORE_SHM)
        elif free < _SHM_TO_SPARE:
            yield warning(found, _MORE_SHM)
        else:
            yield ok(found)


_MORE_SHM = (
    f"make room in {SHM}, or give the container more (docker run --shm-size=8g): MPI, --workers "
    "and kaitian-supervise keep data there"
)


def judge_limits(job: JobFacts) -> Iterator[Verdict]:
    """The ranks may open as many files and connections as the job needs."""
    size = max([len(job.ranks) + len(job.missing), *(f.mpi.size for f in job.ranks if f.mpi)])
    needed = _OWN_FILES + _FILES_PER_RANK * size
    for host, ranks in job.hosts.items():
        allowed = min(
            (f.machine.open_files for f in ranks if f.machine.open_files >= 0), default=-1
        )
        found = f"{'any number of' if allowed < 0 else f'{allowed:,}'} open files{at(job, host)}"
        if 0 <= allowed < needed:
            yield warning(f"{found}, a job of {_count(size, 'rank')} may need {needed:,}", _RAISE)
        else:
            yield ok(found)
    for host, ranks in job.hosts.items():
        devices = ranks[0].devices
        locked = ranks[0].machine.locked_memory_bytes
        fabrics = [n for n in (devices.interconnects if devices else ()) if n.startswith("rdma ")]
        if fabrics and locked >= 0:
            yield warning(
                f"{size_text(locked)} may be locked{at(job, host)}, which has {fabrics[0]}",
                "set `ulimit -l unlimited` for the launcher too: InfiniBand needs locked memory",
            )


_RAISE = "raise it for the launcher too, such as `ulimit -n 65536` or in limits.conf"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
