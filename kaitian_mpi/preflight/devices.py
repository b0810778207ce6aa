"""Verdicts on devices: which there are, which cannot be used, and how fast memory is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kaitian_mpi.devices.choice import assign_devices
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.facts import JobFacts, RankFacts
from kaitian_mpi.preflight.verdict import (
    Verdict,
    by_value,
    ok,
    problem,
    problem_from,
    ranks_text,
    warning,
)

_SLOW_COPIES = 1_000.0  # MB/s: an eighth of the slowest PCIe in use
_UNEVEN = 2.0


def judge_devices(job: JobFacts) -> Iterator[Verdict]:
    """Every rank has a device."""
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
    untried = {
        kind.name
        for devices in (facts.devices for facts in job.ranks if facts.devices is not None)
        for kind in devices.kinds
        if kind.name == devices.kind and not (kind.run_on_hardware or kind.is_host)
    }
    for name in sorted(untried):
        yield warning(
            f"the kind {name} is written from its vendor's documents, and not run on hardware yet",
            "compare its first results with the CPU's",
        )


def _judge_own_devices(host: str, ranks: Sequence[RankFacts]) -> Iterator[Verdict]:
    """Every rank of a host has a device of its own, or may share one."""
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
        chosen = [devices.physical_id for devices in known if devices.physical_id]
        if len(set(chosen)) < len(chosen):  # training, which knows all that is seen, does better
            return
    users: dict[str, list[int]] = {}
    for facts, devices in zip(ranks, known, strict=True):
        library = next((kind.library for kind in devices.kinds if kind.name == devices.kind), "")
        device = devices.library_id or devices.physical_id
        if library and device:
            users.setdefault(f"{devices.kind} {device}", []).append(facts.rank)
    for device, sharing in users.items():
        if len(sharing) > 1:
            yield problem(
                f"{ranks_text(sharing)} share the device {device}, which its library refuses",
                "start fewer ranks, name other devices with --devices, or give --share-device",
                host,
            )


def judge_unusable(job: JobFacts) -> Iterator[Verdict]:
    """Nothing is installed that cannot be used, and no driver lies idle."""
    for host, ranks in job.hosts.items():
        devices = ranks[0].devices
        if devices is None:
            continue
        for fault in devices.faults.values():
            what, _, advice = fault.rpartition("; ")
            yield warning(what or fault, advice if what else "", host)
        accelerators = [kind for kind in devices.kinds if kind.count and not kind.is_host]
        if devices.drivers and not (accelerators or devices.faults):
            yield warning(
                f"driver {_versions(devices.drivers)} is loaded, but torch finds no accelerator",
                "install torch's build, or the vendor's plug-in, for it; in a container, pass the "
                "devices in",
                host,
            )
        elif devices.drivers:
            yield ok(f"driver {_versions(devices.drivers)}", host)


def judge_vendor_packages(job: JobFacts) -> Iterator[Verdict]:
    """Hosts with devices of one kind have the same vendor packages and drivers."""
    by_kind: dict[str, dict[str, dict[int, str]]] = {}
    for facts in job.ranks:
        if facts.devices is not None and not facts.devices.is_host:
            of_kind = by_kind.setdefault(facts.devices.kind, {})
            for name, version in {**facts.devices.packages, **facts.devices.drivers}.items():
                of_kind.setdefault(name, {})[facts.rank] = version
    for kind, packages in by_kind.items():
        for name, versions in packages.items():
            if len(set(versions.values())) > 1:
                yield warning(
                    f"{name} differs between ranks of kind {kind}: {by_value(versions)}",
                    "install the same release: the vendor's libraries may not talk to each other",
                )


def judge_copies(job: JobFacts) -> Iterator[Verdict]:
    """Copies to and from host memory are about as fast everywhere."""
    copied = [
        (facts, facts.devices.to_host_mb_per_sec, facts.devices.to_device_mb_per_sec)
        for facts in job.ranks
        if facts.devices is not None
        and facts.devices.to_host_mb_per_sec is not None
        and facts.devices.to_device_mb_per_sec is not None
    ]
    if not copied:
        if any(facts.devices is not None and facts.devices.chosen for facts in job.ranks):
            yield ok("none needed: every rank computes in host memory")
        return
    fastest = max(min(out, back) for _, out, back in copied)
    for facts, out, back in copied:
        assert facts.devices is not None
        found = (
            f"{ranks_text([facts.rank])} ({facts.devices.chosen}): {out:,.0f} MB/s to the host, "
            f"{back:,.0f} MB/s back"
        )
        if min(out, back) < max(_SLOW_COPIES, fastest / _UNEVEN / 2):
            yield warning(found, "look at the slot's PCIe width, and bind the rank to its socket")
        else:
            yield ok(found)


def _versions(named: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}".rstrip() for name, version in named.items())
