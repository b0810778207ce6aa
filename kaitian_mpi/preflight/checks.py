"""The checks of `kaitian-doctor`, in addition to those before every job.

They are pure functions of facts. A check whose facts are missing gives no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kaitian_mpi.devices.choice import assign_devices
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight import job_checks
from kaitian_mpi.preflight.facts import PACKAGES, Devices, JobFacts, LinkFacts, RankFacts
from kaitian_mpi.preflight.verdict import (
    Verdict,
    by_value,
    count_text,
    differ,
    ok,
    problem,
    problem_from,
    problem_if,
    ranks_by,
    ranks_text,
    size_text,
    warning,
)
from kaitian_mpi.runtime.launcher import different_mpi
from kaitian_mpi.runtime.mpi_libraries import survival_advice

_CHECK_RANK = "check that rank's stderr and its host; raise --timeout if only its disk is slow"
_INSTALL = (
    'install one with pip install "kaitian-mpi[mpi]", or load the module of this system\'s MPI and '
    "build mpi4py with it"
)
_NETWORK = "choose the network with mpirun --mca btl_tcp_if_include"
_RAM_PER_RANK = 1 << 30
_MIN_RAM_PER_RANK = 256 << 20  # used by a rank before it has a model
_MIN_FREE_BYTES = 1 << 30
_SLOW_MB_PER_SEC = 100.0  # a link of 1 Gbit/s has 118


def _check_presence(job: JobFacts) -> Iterator[Verdict]:
    for reason, ranks in ranks_by(job.missing).items():
        yield problem(f"{ranks_text(ranks)}: {reason}", _CHECK_RANK)


def _check_faults(job: JobFacts) -> Iterator[Verdict]:
    faults: dict[tuple[str, str], list[int]] = {}
    for facts in job.ranks:
        for fault in facts.faults.items():
            faults.setdefault(fault, []).append(facts.rank)
    for (name, reason), ranks in faults.items():
        if name != "mpi":
            where = f" ({ranks_text(ranks)})" if len(job.ranks) > 1 else ""
            yield problem(
                f"the examination of {name} failed{where}: {reason}",
                "fix this error, or training would fail the same way",
            )


def _check_software(job: JobFacts) -> Iterator[Verdict]:
    installed = {facts.rank: facts.software.packages for facts in job.ranks}
    missing = {
        rank: ", ".join(name for name in PACKAGES if not packages.get(name))
        for rank, packages in installed.items()
    }
    if lacking := {rank: names for rank, names in missing.items() if names}:
        yield problem(f"not installed: {by_value(lacking)}", "install kaitian-mpi there with pip")
    elif job.ranks:
        first = job.ranks[0].software
        shown = ", ".join(f"{name} {first.packages[name]}" for name in PACKAGES[:3])
        yield ok(f"Python {first.python}, {shown}")
    torch = {rank: packages.get("torch", "") for rank, packages in installed.items()}
    python = {facts.rank: facts.software.python for facts in job.ranks}
    for name, versions in (("torch", torch), ("Python", python)):
        if differ(versions):
            yield ok(f"{name}: {by_value(versions)}")


def _check_mpi(job: JobFacts) -> Iterator[Verdict]:
    failed = [facts.faults["mpi"] for facts in job.ranks if "mpi" in facts.faults]
    for reason in dict.fromkeys(failed):
        yield problem_from(reason, "MPI cannot be used: ", _INSTALL)
    mpi_by_rank = {facts.rank: facts.mpi for facts in job.ranks if facts.mpi is not None}
    if failed or not mpi_by_rank:
        return
    first = next(iter(mpi_by_rank.values()))
    others = {rank: mpi.threads for rank, mpi in mpi_by_rank.items() if mpi.threads != "multiple"}
    if fault := different_mpi(first.launched, first.size, first.library, first.by_srun):
        yield problem(f"{fault[0]} ({first.library})", fault[1])
    elif first.launched < first.size:
        yield problem(
            f"MPI sees {first.size} ranks, but the launcher tells no rank its number",
            "start the job with mpirun; otherwise every rank acts as the first of its host",
        )
    elif others:
        yield problem(
            f"MPI's thread level is {by_value(others)}, not multiple",
            "use a build of MPI with MPI_THREAD_MULTIPLE",
        )
    else:
        yield ok(f"{first.library}, {count_text(first.size, 'rank')}, thread level {first.threads}")


def _check_survival(job: JobFacts) -> Iterator[Verdict]:
    mpi_by_rank = {facts.rank: facts.mpi for facts in job.ranks if facts.mpi is not None}
    if not mpi_by_rank or job.mpirun is not None:
        return
    requested = {
        rank: "on" if mpi.survives_requested else "off" for rank, mpi in mpi_by_rank.items()
    }
    unavailable = [
        rank for rank, mpi in mpi_by_rank.items() if mpi.survives_requested and not mpi.survives
    ]
    if unavailable:
        yield problem(
            f"fault tolerance was requested, but MPI has none on {ranks_text(unavailable)}",
            "use an Open MPI 5 built with ULFM (ompi_info: Fault Tolerance support: yes)",
        )
    elif differ(requested):
        yield problem(
            f"fault tolerance differs between ranks: {by_value(requested)}",
            "use mpirun --with-ft ulfm instead of a variable that only some hosts have",
        )
    elif "on" in requested.values():
        yield ok("fault tolerance is on")
    else:
        advice = survival_advice(next(iter(mpi_by_rank.values())).library)
        yield ok(f"fault tolerance is off, the loss of a rank ends the job; {advice}")


def _check_mpirun(job: JobFacts) -> Iterator[Verdict]:
    if job.mpirun:
        yield ok(f"{job.mpirun}; to examine its ranks: mpirun -np 2 kaitian-doctor")
    elif job.mpirun is not None:
        yield problem("there is no mpirun in PATH", 'install one: pip install "kaitian-mpi[mpi]"')


def _check_cores(job: JobFacts) -> Iterator[Verdict]:
    for host, ranks in job.hosts.items():
        on_cpu = [rank for rank in ranks if rank.devices is None or rank.devices.is_host]
        cores = job_checks.count_cores(ranks)
        text = f"{count_text(cores, 'core')} for {count_text(len(ranks), 'rank')}"
        if len(ranks) == ranks[0].local_size and len(on_cpu) > cores:
            yield warning(text, "start fewer ranks there: more are not faster", host)
        else:
            yield ok(text if job.mpirun is None else count_text(cores, "core"), host)


def _check_ram(job: JobFacts) -> Iterator[Verdict]:
    for host, ranks in job.hosts.items():
        host_devices = [facts.devices for facts in ranks if facts.devices is not None]
        if not host_devices:
            continue
        free = min(devices.ram_free_bytes for devices in host_devices)
        text = f"{size_text(free)} of {size_text(host_devices[0].ram_bytes)} free"
        free_per_rank = free / len(ranks)
        if free_per_rank < _RAM_PER_RANK:
            is_bad = free_per_rank < _MIN_RAM_PER_RANK
            shared = f"{text} for {count_text(len(ranks), 'rank')}"
            yield problem_if(is_bad, shared, "free memory, or start fewer ranks", host)
        else:
            yield ok(text, host)


def _check_storage(job: JobFacts) -> Iterator[Verdict]:
    for host, ranks in job.hosts.items():
        for storage in [facts.storage for facts in ranks if facts.storage is not None][:1]:
            text = f"{storage.folder}: {size_text(storage.free_bytes)} free"
            if storage.error:
                text = f"{storage.folder} cannot be written: {storage.error}"
            if storage.error or storage.free_bytes < _MIN_FREE_BYTES:
                advice = "make room, or choose another --run-dir"
                yield problem_if(bool(storage.error), text, advice, host)
            else:
                yield ok(text, host)


def _check_devices(job: JobFacts) -> Iterator[Verdict]:
    for facts in job.ranks:
        devices = facts.devices
        if devices is not None and devices.error:
            where = f"{ranks_text([facts.rank])}: " if len(job.ranks) > 1 else ""
            yield problem_from(devices.error, where, "see docs/devices.md")
    devices_by_rank = {
        facts.rank: facts.devices for facts in job.ranks if facts.devices is not None
    }
    declining = [rank for rank, devices in devices_by_rank.items() if not devices.vendor_library]
    yield from job_checks.check_libraries(map(_library_of, devices_by_rank.values()), declining)
    for host, ranks in job.hosts.items():
        yield from _check_own_devices(host, ranks, uses_libraries=not declining)
        devices = ranks[0].devices
        if devices is None:
            continue
        present = [kind for kind in devices.kinds if kind.count]
        yield ok(", ".join(k.name if k.is_host else f"{k.count} {k.name}" for k in present), host)


def _library_of(devices: Devices) -> str:
    """Return the library of the rank's own device; "" without one."""
    return next((kind.library for kind in devices.kinds if kind.name == devices.kind), "")


def _check_own_devices(
    host: str, ranks: Sequence[RankFacts], uses_libraries: bool
) -> Iterator[Verdict]:
    host_devices = [facts.devices for facts in ranks if facts.devices is not None]
    # A mismatch means several hosts of one name, as containers may have.
    if len(host_devices) != ranks[0].local_size or any(devices.shares for devices in host_devices):
        return
    if host_devices[0].requested == "auto":
        try:
            assign_devices([devices.seen for devices in host_devices], host)
        except UserError as error:
            yield problem_from(str(error))
        return
    users: dict[str, list[int]] = {}
    for facts, devices in zip(ranks, host_devices, strict=True):
        if uses_libraries and _library_of(devices) and devices.physical_id:
            users.setdefault(f"{devices.kind} {devices.physical_id}", []).append(facts.rank)
    for device, sharing in users.items():
        if len(sharing) > 1:
            yield problem(
                f"{ranks_text(sharing)} share the device {device}, which its library refuses",
                "start fewer ranks, choose other devices with --devices, or use --share-device",
                host,
            )


def _check_drivers(job: JobFacts) -> Iterator[Verdict]:
    for host, ranks in job.hosts.items():
        devices = ranks[0].devices
        if devices is None:
            continue
        for fault in devices.faults.values():
            reason, _, advice = fault.rpartition("; ")
            yield warning(reason or fault, advice if reason else "", host)
        drivers = ", ".join(f"driver {name} {v}".rstrip() for name, v in devices.drivers.items())
        accelerators = [kind for kind in devices.kinds if kind.count and not kind.is_host]
        if drivers and not (accelerators or devices.faults):
            yield warning(
                f"{drivers} is loaded, but torch finds no accelerator",
                "install torch's build, or the vendor's plug-in, for it; in a container, pass the "
                "devices in",
                host,
            )
        elif drivers:
            yield ok(drivers, host)


def _check_links(job: JobFacts) -> Iterator[Verdict]:
    between_hosts = any(link.hosts[0] != link.hosts[1] for link in job.links)
    for link in job.links:
        speed = link.mb_per_sec
        if link.error:
            advice = f"check for a firewall between the hosts, and {_NETWORK}"
            yield problem(f"between {_ends(link)}: {link.error}", advice)
        elif between_hosts and speed is not None and speed < _SLOW_MB_PER_SEC:
            text = f"between {_ends(link)}: {speed:,.0f} MB/s"
            yield warning(text, f"{_NETWORK}, use larger batches, or leave the host out")
    speeds = [link.mb_per_sec for link in job.links if link.mb_per_sec is not None]
    delays = [link.latency_us for link in job.links if link.latency_us is not None]
    if speeds:
        pairs = f"{len(speeds)} pairs of {'hosts' if between_hosts else 'ranks'}"
        figures = f"{_range(delays)} us, {_range(speeds)} MB/s"
        yield ok(f"{pairs if len(speeds) > 1 else 'one pair'}: {figures}")


def _ends(link: LinkFacts) -> str:
    first, second = link.ranks
    first_host, second_host = link.hosts
    if first_host == second_host:
        return f"ranks {first} and {second}"
    return f"{first_host} (rank {first}) and {second_host} (rank {second})"


def _range(values: list[float]) -> str:
    least, most = (f"{end:,.0f}" if end >= 1 else "<1" for end in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


CHECKS: Mapping[str, job_checks.Check] = {
    "ranks": _check_presence,
    "examination": _check_faults,
    "software": _check_software,
    "versions": job_checks.check_versions,
    "mpi": _check_mpi,
    "mpirun": _check_mpirun,
    "survival": _check_survival,
    "devices": _check_devices,
    "drivers": _check_drivers,
    "cores": _check_cores,
    "binding": job_checks.check_binding,
    "memory": _check_ram,
    "shared memory": job_checks.check_shared_memory,
    "limits": job_checks.check_limits,
    "run folder": _check_storage,
    "links": _check_links,
}
