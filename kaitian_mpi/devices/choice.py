"""Chooses each rank's device from what its host has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kaitian_mpi.errors import UserError


@dataclass(frozen=True)
class Choice:
    """The device chosen for a rank."""

    kind: str
    index: int


def choose_device(
    request: str,
    counts: Mapping[str, int],
    local_rank: int,
    local_size: int,
    host: str,
    faults: Mapping[str, str] = MappingProxyType({}),
) -> Choice:
    """Choose this rank's device.

    Args:
        request: the value of `--devices`: `auto`, `cpu` or a list by local rank.
        counts: the host's number of devices of each kind, in order of preference.
        local_rank: the rank's number among those on its host.
        local_size: the number of ranks on the host.
        host: the host's name, for messages.
        faults: kinds that cannot be used, and why.

    Raises:
        UserError: the host does not have the requested device, or has more ranks than devices; or
            the requested kind cannot be used.
    """
    if request == "auto":
        return _automatic(counts, local_rank, local_size, host)
    if request == "cpu":
        return Choice("cpu", local_rank)
    entries = [_parse(entry, counts, faults) for entry in request.split(",")]
    if len(entries) < local_size:
        raise UserError(
            f"--devices {request}: found {len(entries)} of {local_size} devices for {host}, needed "
            "one for each of its ranks; name more, or start fewer ranks there"
        )
    choice = entries[local_rank]
    if choice.kind != "cpu" and choice.index >= counts[choice.kind]:
        raise UserError(
            f"--devices {request}: local rank {local_rank} on {host} asks for "
            f"{choice.kind}:{choice.index}, but {_inventory(counts, host)}"
        )
    return choice


def _automatic(counts: Mapping[str, int], local_rank: int, local_size: int, host: str) -> Choice:
    kind = next((k for k in counts if k != "cpu" and counts[k] > 0), "cpu")
    if kind != "cpu" and local_size > counts[kind]:
        spare = ["cpu"] * (local_size - counts[kind])
        example = ",".join([f"{kind}:{i}" for i in range(counts[kind])] + spare)
        raise UserError(
            f"{local_size} ranks on {host}, but {_inventory(counts, host)}; start "
            f"{counts[kind]} ranks there, or name each one's device, such as --devices {example}"
        )
    return Choice(kind, local_rank)


def _parse(entry: str, counts: Mapping[str, int], faults: Mapping[str, str]) -> Choice:
    kind, _, index = entry.strip().partition(":")
    if kind in faults and kind not in counts:
        raise UserError(f"--devices {entry}: {faults[kind]}")
    if kind not in counts or not (index or "0").isdigit():
        raise UserError(
            f"--devices: found {entry!r}, needed auto, or entries such as cuda:0 or cpu, "
            f"of the kinds {', '.join(counts)}"
        )
    return Choice(kind, int(index or 0))


def _inventory(counts: Mapping[str, int], host: str) -> str:
    found = [f"{n} {kind}" for kind, n in counts.items() if kind != "cpu" and n]
    return f"{host} has {', '.join(found) if found else 'no accelerator'}"
