"""Examines a host's devices, in a process of its own: vendors' code may hang or crash."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import psutil
import torch

from kaitian_mpi.devices import known_kinds
from kaitian_mpi.devices.choice import choose_device
from kaitian_mpi.devices.cpu import CGROUP, available_bytes
from kaitian_mpi.devices.plugin import one_line
from kaitian_mpi.devices.registry import Kinds
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.facts import Devices, Kind

_VENDOR_PACKAGE = re.compile(
    r"torch[-_].+|nvidia-(nccl|cuda-runtime|cudnn)\b.*|(intel|oneccl)[-_].*torch.*|.*[-_]pt|triton.*"
)
_DRIVERS = (
    *("nvidia", "amdgpu", "cambricon", "cambricon_drv"),
    *("drv_devmm_host", "mtgpu", "xe", "i915"),
)
_MODULES = Path("/sys/module")
_ASCEND_VERSION = Path("/usr/local/Ascend/driver/version.info")


def examine_devices(
    devices: str, share: bool, local_rank: int, local_size: int, host: str
) -> Devices:
    """Choose this rank's device as training does.

    Training also knows what the other ranks see; whether there are enough devices is judged later.
    """
    known = known_kinds()
    facts = Devices(
        kinds=tuple(
            Kind(
                name=name,
                count=known.counts[name],
                is_host=device.is_host,
                library=device.library,
            )
            for name, device in known.devices.items()
        ),
        faults=dict(known.faults),
        seen={},
        requested=devices,
        shares=share,
        chosen="",
        physical_id="",
        kind="",
        name="",
        memory_bytes=0,
        is_host=False,
        error="",
        ram_bytes=int(psutil.virtual_memory().total),
        ram_free_bytes=available_bytes(CGROUP),
        packages=vendor_packages(),
        drivers=loaded_drivers(),
    )
    try:
        facts = replace(facts, seen=known.accelerators())
        return _with_device(facts, known, (local_rank, local_size), host)
    except UserError as failure:
        return replace(facts, error=str(failure))
    except Exception as failure:  # whatever a vendor's code raises
        return replace(facts, error=one_line(failure))


def _with_device(facts: Devices, known: Kinds, place: tuple[int, int], host: str) -> Devices:
    """Choose a rank's device and use it; `place` is its local rank and size.

    With `auto`, each rank may see one device, and that its own: then it is this rank's.
    """
    request = facts.requested
    if request == "auto" and any(len(ids) < place[1] for ids in facts.seen.values()):
        place = (0, 1)
    choice = choose_device(request, known.counts, *place, host, known.unusable, share=facts.shares)
    device, index = known.devices[choice.kind], choice.index
    device.select(index)
    torch.empty(1, device=device.torch_device(index))  # it works
    return replace(
        facts,
        chosen=str(device.torch_device(index)),
        physical_id=device.physical_id(index),
        kind=device.kind,
        name=device.name(index),
        memory_bytes=device.memory_bytes(index),
        is_host=device.is_host,
    )


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
    present = [name for name in _DRIVERS if (_MODULES / name).is_dir()]
    found = {name: _read(_MODULES / name / "version") for name in present}
    if version := re.search(r"(?im)^\s*version\s*=\s*(\S+)", _read(_ASCEND_VERSION)):
        found["ascend"] = version[1]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
