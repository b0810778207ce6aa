"""The registry of device kinds: built-in ones, and those of other packages."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaitian_mpi.devices.plugin import (
    PLUGINS,
    KindError,
    devices_seen_by_child,
    is_installed,
    one_line,
)
from kaitian_mpi.devices.protocol import Device

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import torch

GROUP = "kaitian_mpi.devices"
"""The entry point group by which other packages add kinds: kind = module:Class."""

BUILT_IN = {
    "cuda": "kaitian_mpi.devices.cuda:CudaDevice",
    "rocm": "kaitian_mpi.devices.rocm:RocmDevice",
    "npu": "kaitian_mpi.devices.npu:NpuDevice",
    "mlu": "kaitian_mpi.devices.mlu:MluDevice",
    "musa": "kaitian_mpi.devices.musa:MusaDevice",
    "xpu": "kaitian_mpi.devices.xpu:XpuDevice",
    "mps": "kaitian_mpi.devices.mps:MpsDevice",
    "cpu": "kaitian_mpi.devices.cpu:CpuDevice",
}

_MEMBERS = [name for name in {**Device.__annotations__, **vars(Device)} if not name.startswith("_")]


@dataclass(frozen=True)
class Kinds:
    """The usable kinds, in order of preference, and why others are not usable."""

    devices: Mapping[str, Device]
    counts: Mapping[str, int]
    """The number of devices of each kind that this process sees."""
    faults: Mapping[str, str]
    """For each kind that is installed but cannot be used: why, and what to do."""
    absent: Mapping[str, str]
    """For each built-in kind whose plug-in is not installed: what to install."""
    probed: Mapping[str, Sequence[str]]
    """The physical ids of the devices of kinds that another process has counted."""

    def physical_ids(self, kind: str) -> Sequence[str]:
        """Return the physical ids of the devices that this process sees, by index.

        Initializes the kind in this process, unless another process has counted its devices.
        """
        if kind in self.probed:
            return self.probed[kind]
        return [self.devices[kind].physical_id(index) for index in range(self.counts[kind])]

    def accelerators(self) -> dict[str, tuple[str, ...]]:
        """Return the accelerators that this process sees: physical ids by kind and index.

        In order of preference, without kinds that have none. Initializes them as `physical_ids`.
        """
        present = [kind for kind, device in self.devices.items() if not device.is_host]
        return {kind: tuple(self.physical_ids(kind)) for kind in present if self.counts[kind]}

    @property
    def unusable(self) -> dict[str, str]:
        """Why kinds cannot be used, whether they are faulty or not installed."""
        return {**self.absent, **self.faults}


@functools.cache
def known_kinds() -> Kinds:
    """Load all kinds and find their devices, once per process.

    A kind that cannot be used is not an error unless it is asked for: see `Kinds.faults`.
    """
    devices: dict[str, Device] = {}
    counts: dict[str, int] = {}
    probed: dict[str, Sequence[str]] = {}
    faults: dict[str, str] = {}
    installed = [kind for kind, plugin in PLUGINS.items() if is_installed(plugin)]
    absent = {
        kind: f"{kind} devices need the package {plugin}, which is not installed here; install its "
        "release for this release of torch, or name other devices"
        for kind, plugin in PLUGINS.items()
        if kind not in installed
    }
    for entry in _entries():
        kind = entry.name
        if kind in absent and entry.value == BUILT_IN[kind]:
            continue
        try:
            if kind in devices:
                raise TypeError("there is already a kind of this name")
            device = _load(entry)
            if kind in installed and len(installed) > 1:  # this process can use only one of them
                probed[kind] = devices_seen_by_child(kind)
                counts[kind] = len(probed[kind])
            else:
                counts[kind] = int(device.count())
            devices[kind] = device
        except KindError as error:
            faults[kind] = f"the device kind {kind!r} cannot be used: {error}"
        except (Exception, SystemExit) as error:  # whatever another package's code raises
            faults[kind] = _describe(entry, error)
    # Last in order of preference, because it always exists.
    devices["cpu"], counts["cpu"] = devices.pop("cpu"), counts.pop("cpu")
    return Kinds(devices, counts, faults, absent, probed)


def load_built_in(kind: str) -> Device:
    """Return a built-in kind, whether or not it has devices."""
    return _load(next(entry for entry in _entries() if entry.name == kind))


def find_devices(device: Device) -> list[str]:
    """Return the physical ids of the devices that this process sees, by index."""
    return [device.physical_id(index) for index in range(device.count())]


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


def _describe(entry: EntryPoint, error: BaseException) -> str:
    return (
        f"the device kind {entry.name!r} ({entry.value}) cannot be used: {one_line(error)}; "
        "correct, update or remove the package that adds it"
    )
