"""The registry of device kinds: built-in kinds, and those of other packages."""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaitian_mpi.config.factory import one_line
from kaitian_mpi.devices.plugin import PLUGINS, KindError, is_installed
from kaitian_mpi.devices.protocol import Device

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import torch

GROUP = "kaitian_mpi.devices"
"""The entry point group by which other packages add kinds: kind = module:Class."""

BUILT_IN = {
    "cuda": "kaitian_mpi.devices.vendors:CudaDevice",
    "rocm": "kaitian_mpi.devices.vendors:RocmDevice",
    "npu": "kaitian_mpi.devices.vendors:NpuDevice",
    "mlu": "kaitian_mpi.devices.vendors:MluDevice",
    "musa": "kaitian_mpi.devices.vendors:MusaDevice",
    "xpu": "kaitian_mpi.devices.vendors:XpuDevice",
    "mps": "kaitian_mpi.devices.vendors:MpsDevice",
    "cpu": "kaitian_mpi.devices.cpu:CpuDevice",
}


@dataclass(frozen=True)
class Kinds:
    """The usable kinds, in order of preference, and the reasons why others are unusable."""

    devices: Mapping[str, Device]
    counts: Mapping[str, int]
    """The number of devices of each kind that this process sees."""
    faults: Mapping[str, str]
    """For each installed kind that cannot be used: the reason and advice."""
    unusable: Mapping[str, str]
    """The same, and for each built-in kind missing in this torch: what to install."""

    def accelerators(self) -> dict[str, tuple[str, ...]]:
        """Initialize the visible devices; return their physical IDs, by kind and index."""
        return {
            kind: tuple(device.physical_id(index) for index in range(self.counts[kind]))
            for kind, device in self.devices.items()
            if self.counts[kind] and not device.is_host
        }


@functools.cache
def known_kinds() -> Kinds:
    """Load all kinds that torch supports, and count their devices, once per process."""
    devices: dict[str, Device] = {}
    counts: dict[str, int] = {}
    faults: dict[str, str] = {}
    absent = {
        kind: f"{kind} devices need {needed}; install it, or name other devices"
        for kind in BUILT_IN
        if (needed := _lacks(kind))
    }
    for entry in _entries(absent):
        kind = entry.name
        try:
            if kind in devices or BUILT_IN.get(kind, entry.value) != entry.value:
                raise TypeError("there is another kind, or a built-in one, of this name")
            device = _load(entry)
            counts[kind] = int(device.count())
            devices[kind] = device
        except KindError as error:
            faults[kind] = f"the device kind {kind!r} cannot be used: {error}"
        except (Exception, SystemExit) as error:  # whatever another package's code raises
            faults[kind] = (
                f"the device kind {kind!r} ({entry.value}) cannot be used: {one_line(error)}; "
                "correct, update or remove the package that adds it"
            )
    # Last in order of preference, because it always exists.
    devices["cpu"], counts["cpu"] = devices.pop("cpu"), counts.pop("cpu")
    return Kinds(devices, counts, faults, {**absent, **faults})


def _lacks(kind: str) -> str:
    """Return the missing requirement of a built-in kind; "" if none is. Imports no kind."""
    import torch

    if kind in PLUGINS:
        if is_installed(PLUGINS[kind]):
            return ""
        return f"the package {PLUGINS[kind]} in a release that matches this torch"
    builds = {
        "cuda": torch.version.cuda,  # in a build for AMD, its devices have the torch type cuda
        "rocm": torch.version.hip,
        "xpu": torch.xpu._is_compiled(),
        "mps": torch.backends.mps.is_built(),
    }
    return "" if builds.get(kind, True) else "a build of torch for them"


def device_of(device: torch.device) -> Device:
    """Return the kind of a torch device, which need not be this rank's own device."""
    return _device_of_type(device.type)


@functools.cache
def _device_of_type(torch_type: str) -> Device:
    kinds = known_kinds()
    alike = [kind for kind, device in kinds.devices.items() if device.torch_type == torch_type]
    if alike:
        # Of several packages' kinds, at most one has devices.
        return kinds.devices[max(alike, key=lambda kind: kinds.counts[kind] > 0)]
    from kaitian_mpi.devices.accelerator import UnlistedAccelerator

    return UnlistedAccelerator(torch_type)


def _entries(absent: Container[str]) -> Iterator[EntryPoint]:
    # Imported late: the commands load this module before they check their flags.
    from importlib.metadata import EntryPoint, entry_points

    for name, value in BUILT_IN.items():
        if name not in absent:
            yield EntryPoint(name, value, GROUP)
    yield from sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))


def _load(entry: EntryPoint) -> Device:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", entry.name) or entry.name == "auto":
        raise TypeError("a kind's name must consist of lower-case letters, digits and underscores")
    device: Device = entry.load()()
    if not isinstance(device, Device):
        raise TypeError("the class does not derive from kaitian_mpi.devices.Device")
    if device.kind != entry.name:
        raise TypeError(f"the class has kind {device.kind!r}")
    return device
