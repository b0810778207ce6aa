"""Verdicts on hosts: cores, memory, limits, the run folder's file system, devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kaitian_mpi.devices.choice import assign_devices
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.facts import JobFacts, RankFacts
from kaitian_mpi.preflight.verdict import (
    Verdict,
    count_text,
    ok,
    problem,
    problem_from,
    problem_if,
    ranks_text,
    size_text,
    warning,
)

_RAM_PER_RANK = 1 << 30
_MIN_RAM_PER_RANK = 256 << 20  # what a rank takes before it has a model
_ROOM = 1 << 30


def judge_cores(job: JobFacts) -> Iterator[Verdict]:
    """Check that no host has more CPU ranks than cores."""
    for host, ranks in job.hosts.items():
        on_cpu = [r for r in ranks if r.devices is None or r.devices.is_host]
        cores = max(facts.machine.cores for facts in ranks)
        found = f"{count_text(cores, 'core')} for {count_text(len(ranks), 'rank')}"
        if len(ranks) == ranks[0].local_size and len(on_cpu) > cores:
            yield warning(found, "start fewer ranks there: they train as fast", host)
        else:
            yield ok(found if job.mpirun is None else count_text(cores, "core"), host)


def judge_ram(job: JobFacts) -> Iterator[Verdict]:
    """Check that every host has memory for its ranks."""
    for host, ranks in job.hosts.items():
        known = [facts.devices for facts in ranks if facts.devices is not None]
        if not known:
            continue
        free = min(devices.ram_free_bytes for devices in known)
        found = f"{size_text(free)} of {size_text(known[0].ram_bytes)} free"
        each, shared = free / len(ranks), f"{found} for {count_text(len(ranks), 'rank')}"
        if each < _RAM_PER_RANK:
            is_bad = each < _MIN_RAM_PER_RANK
            yield problem_if(is_bad, shared, "free memory, or start fewer ranks", host)
        else:
            yield ok(found, host)


def judge_storage(job: JobFacts) -> Iterator[Verdict]:
    """Check that the first rank of every host can write results: any may have to."""
    for host, ranks in job.hosts.items():
        for storage in [facts.storage for facts in ranks if facts.storage is not None][:1]:
            found = f"{storage.folder}: {size_text(storage.free_bytes)} free"
            if storage.error:
                found = f"{storage.folder} cannot be written: {storage.error}"
            if storage.error or storage.free_bytes < _ROOM:
                advice = "make room, or give --run-dir another folder"
                yield problem_if(bool(storage.error), found, advice, host)
            else:
                yield ok(found, host)


def judge_devices(job: JobFacts) -> Iterator[Verdict]:
    """Check that every rank has a device."""
    for facts in job.ranks:
        devices = facts.devices
        if devices is not None and devices.error:
            where = f"{ranks_text([facts.rank])}: " if len(job.ranks) > 1 else ""
            yield problem_from(devices.error, where, "see docs/devices.md")
    for host, ranks in job.hosts.items():
        yield from _judge_own_devices(host, ranks)
        devices = ranks[0].devices
        if devices is None:
            continue
        present = [kind for kind in devices.kinds if kind.count]
        yield ok(", ".join(k.name if k.is_host else f"{k.count} {k.name}" for k in present), host)


def _judge_own_devices(host: str, ranks: Sequence[RankFacts]) -> Iterator[Verdict]:
    """Check that every rank of a host has its own device, or may share one."""
    known = [facts.devices for facts in ranks if facts.devices is not None]
    # More than there are local ranks: hosts of one name, as containers may have.
    if len(known) != ranks[0].local_size or any(devices.shares for devices in known):
        return
    if known[0].requested == "auto":
        try:
            assign_devices([devices.seen for devices in known], host)
        except UserError as error:
            yield problem_from(str(error))
        return
    users: dict[str, list[int]] = {}
    for facts, devices in zip(ranks, known, strict=True):
        has_library = any(kind.library for kind in devices.kinds if kind.name == devices.kind)
        if has_library and devices.physical_id:
            users.setdefault(f"{devices.kind} {devices.physical_id}", []).append(facts.rank)
    for device, sharing in users.items():
        if len(sharing) > 1:
            yield problem(
                f"{ranks_text(sharing)} share the device {device}, which its library refuses",
                "start fewer ranks, name other devices with --devices, or give --share-device",
                host,
            )


def judge_drivers(job: JobFacts) -> Iterator[Verdict]:
    """Check that every installed kind can be used, and that no driver is idle."""
    for host, ranks in job.hosts.items():
        devices = ranks[0].devices
        if devices is None:
            continue
        for fault in devices.faults.values():
            what, _, advice = fault.rpartition("; ")
            yield warning(what or fault, advice if what else "", host)
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
