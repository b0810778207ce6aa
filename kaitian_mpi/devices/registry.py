"""The registry of device kinds: built-in ones, and those of other packages."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaitian_mpi.devices.protocol import Device

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import torch

GROUP = "kaitian_mpi.devices"
"""The entry point group by which other packages add kinds: kind = module:Class."""

BUILT_IN = {
    "cuda": "kaitian_mpi.devices.cuda:CudaDevice",
    "cpu": "kaitian_mpi.devices.cpu:CpuDevice",
}

_MEMBERS = [name for name in {**Device.__annotations__, **vars(Device)} if not name.startswith("_")]


@dataclass(frozen=True)
class Kinds:
    """The usable kinds, in order of preference, and why others are not usable."""

    devices: Mapping[str, Device]
    counts: Mapping[str, int]
    """This host's number of devices of each kind."""
    faults: Mapping[str, str]
    """For each unusable kind of another package, by name: why, and what to do."""


@functools.cache
def known_kinds() -> Kinds:
    """Load all kinds and count their devices, once per process.

    A kind that cannot be loaded is not an error unless it is used: see `Kinds.faults`.
    """
    devices: dict[str, Device] = {}
    counts: dict[str, int] = {}
    faults: dict[str, str] = {}
    for entry in _entries():
        try:
            if entry.name in devices:
                raise TypeError("there is already a kind of this name")
            device = _load(entry)
            counts[entry.name] = int(device.count())
            devices[entry.name] = device
        except Exception as error:  # whatever another package's code raises
            faults[entry.name] = _describe(entry, error)
    # Last in order of preference, because it always exists.
    devices["cpu"], counts["cpu"] = devices.pop("cpu"), counts.pop("cpu")
    return Kinds(devices, counts, faults)


def device_of(device: torch.device) -> Device:
    """Return the kind of a torch device, which need not be this rank's own device."""
    return _device_of_type(device.type)


@functools.cache
def _device_of_type(torch_type: str) -> Device:
    kinds = known_kinds()
    alike = [kind for kind, device in kinds.devices.items() if device.torch_type == torch_type]
    if alike:
        # A build of torch supports one vendor at most, so at most one of these kinds has devices.
        return kinds.devices[max(alike, key=lambda kind: kinds.counts[kind] > 0)]
    from kaitian_mpi.devices.accelerator import UnlistedAccelerator

    return UnlistedAccelerator(torch_type)


def _entries() -> Iterator[EntryPoint]:
    # Imported late: the commands load this module before they check their flags.
    from importlib.metadata import EntryPoint, entry_points

    for name, value in BUILT_IN.items():
        yield EntryPoint(name, value, GROUP)
    yield from sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))


def _load(entry: EntryPoint) -> Device:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", entry.name) or entry.name == "auto":
        raise TypeError("a kind's name must consist of lower-case letters, digits and underscores")
    device: Device = entry.load()()
    missing = [name for name in _MEMBERS if not hasattr(device, name)]
    if missing:
        raise TypeError(f"the class lacks {', '.join(missing)}")
    if device.kind != entry.name:
        raise TypeError(f"the class has kind {device.kind!r}")
    return device


def _describe(entry: EntryPoint, error: Exception) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"the device kind {entry.name!r} ({entry.value}) cannot be used: {reason}; "
        "correct, update or remove the package that adds it"
    )
