"""Examines a host's devices, in a process of its own: vendors' code may hang or crash."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path

import psutil
import torch

from kaitian_mpi.devices import Device, known_kinds
from kaitian_mpi.devices.choice import choose_device
from kaitian_mpi.devices.cpu import CGROUP, available_bytes
from kaitian_mpi.devices.plugin import one_line
from kaitian_mpi.devices.registry import Kinds
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.facts import Devices, Kind

_COPY_BYTES = 64 << 20
_COPIES = 5
_VENDOR_PACKAGE = re.compile(
    r"torch[-_].+|nvidia-(nccl|cuda-runtime|cudnn)\b.*|(intel|oneccl)[-_].*torch.*|.*[-_]pt|triton.*"
)
_DRIVERS = (
    "nvidia",
    "amdgpu",
    "cambricon",
    "cambricon_drv",
    "drv_devmm_host",
    "mtgpu",
    "xe",
    "i915",
)
_MODULES = Path("/sys/module")
_VERSION_FILES = (Path("/usr/local/Ascend/driver/version.info"),)
_NETWORK = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class _Found:
    """What was found of one rank's device, up to what failed."""

    seen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    device: Device | None = None
    index: int = 0
    physical_id: str = ""
    library_id: str = ""
    to_host: float | None = None
    to_device: float | None = None
    error: str = ""

    @property
    def usable(self) -> Device | None:
        """The device, if nothing failed."""
        return None if self.error else self.device


def examine_devices(
    devices: str, share: bool, local_rank: int, local_size: int, host: str
) -> Devices:
    """Choose this rank's device as training does, and time its copies.

    Training also knows what the other ranks see; whether there are enough devices is judged later.

    Args:
        devices: as `--devices`.
        share: as `--share-device`.
        local_rank: the rank's number among those on its host.
        local_size: the number of ranks on the host.
        host: its name, for messages.
    """
    known = known_kinds()
    found = _find_device(known, devices, share, (local_rank, local_size), host)
    device, usable, index = found.device, found.usable, found.index
    return Devices(
        kinds=tuple(_describe(kind, known.counts[name]) for name, kind in known.devices.items()),
        faults=dict(known.faults),
        absent=tuple(known.absent),
        seen=found.seen,
        requested=devices,
        shares=share,
        chosen="" if usable is None else str(usable.torch_device(index)),
        physical_id=found.physical_id,
        library_id=found.library_id,
        kind="" if device is None else device.kind,
        name="" if usable is None else usable.name(index),
        memory_bytes=0 if usable is None else usable.memory_bytes(index),
        is_host=device is not None and device.is_host,
        to_host_mb_per_sec=found.to_host,
        to_device_mb_per_sec=found.to_device,
        error=found.error,
        ram_bytes=int(psutil.virtual_memory().total),
        ram_free_bytes=available_bytes(CGROUP),
        packages=vendor_packages(),
        drivers=loaded_drivers(),
        interconnects=interconnects(),
    )


def _find_device(
    known: Kinds, devices: str, share: bool, place: tuple[int, int], host: str
) -> _Found:
    """Choose a rank's device, select it, and time its copies; `place` is its local rank and size.

    With `auto`, each rank may see one device, and that its own: then it is this rank's.
    """
    found = _Found()
    try:
        found = replace(found, seen=known.accelerators())
        if devices == "auto" and any(len(ids) < place[1] for ids in found.seen.values()):
            place = (0, 1)
        choice = choose_device(devices, known.counts, *place, host, known.unusable, share=share)
        device, index = known.devices[choice.kind], choice.index
        found = replace(found, device=device, index=index)
        device.select(index)
        physical, by_library = device.physical_id(index), device.library_id(index)
        found = replace(found, physical_id=physical, library_id=by_library)
        if not device.is_host:
            out, back = time_copies(device, index)
            found = replace(found, to_host=out, to_device=back)
    except UserError as failure:
        found = replace(found, error=str(failure))
    except Exception as failure:  # whatever a vendor's code raises
        found = replace(found, error=one_line(failure))
    return found


def _describe(device: Device, count: int) -> Kind:
    return Kind(
        name=device.kind,
        count=count,
        is_host=device.is_host,
        library=device.library,
        run_on_hardware=device.run_on_hardware,
    )


def time_copies(device: Device, index: int) -> tuple[float, float]:
    """Return the bandwidths of copies to the host and back, in 10^6 bytes a second.

    The best of some copies of 64 MiB, or of what fits, each way.
    """
    free = device.memory_limit_bytes(index, 1)
    size = max(1 << 20, min(_COPY_BYTES, free // 4))
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=device.pins_memory)
    on_device = torch.empty(size, dtype=torch.uint8, device=device.torch_device(index))
    rates = []
    for target, source in ((on_host, on_device), (on_device, on_host)):
        best = float("inf")
        for _ in range(_COPIES):
            device.synchronize(index)
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            device.synchronize(index)
            best = min(best, time.perf_counter() - began)
        rates.append(size / best / 1e6)
    return rates[0], rates[1]


def vendor_packages() -> dict[str, str]:
    """Return the installed packages that belong to a vendor's torch, and their versions."""
    found = {each.metadata["Name"] or "": each.version for each in distributions()}
    return {
        name: release
        for name, release in sorted(found.items())
        if _VENDOR_PACKAGE.fullmatch(name.lower())
    }


def loaded_drivers() -> dict[str, str]:
    """Return the accelerators' kernel drivers that are loaded, and their versions if known."""
    found = {}
    for name in _DRIVERS:
        if (_MODULES / name).is_dir():
            found[name] = _read(_MODULES / name / "version")
    for path in _VERSION_FILES:
        for line in _read(path).splitlines():
            key, _, value = line.partition("=")
            if key.strip().lower() == "version":
                found[path.parent.parent.name.lower()] = value.strip()
    return found


def interconnects() -> dict[str, str]:
    """Return the network interfaces that are up, and RDMA devices, with their speeds."""
    found = {}
    for path in sorted(_NETWORK.glob("*")):
        if path.name != "lo" and _read(path / "operstate") == "up":
            speed = _read(path / "speed")
            known = speed.isdigit() and speed != "0"
            found[path.name] = f"{int(speed) / 1000:g} Gbit/s" if known else ""
    for port in sorted(_RDMA.glob("*/ports/*")):
        if "ACTIVE" in _read(port / "state"):
            found[f"rdma {port.parent.parent.name}"] = _read(port / "rate")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # missing, or a virtual interface without a speed
        return ""
