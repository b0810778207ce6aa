"""Runs one examination in a separate process, as vendors' code may hang or crash; prints JSON.

python -P -m kaitian_mpi.preflight.probe NAME ARGUMENTS
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaitian_mpi.preflight.facts import Devices, Kind, Storage
from kaitian_mpi.runtime.system import die_with_parent

if TYPE_CHECKING:
    from kaitian_mpi.devices.registry import Kinds

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
_WRITTEN_BYTES = 16 << 20  # a small checkpoint; a single byte may fit even on a full disk
_MODULES = Path("/sys/module")
_ASCEND_VERSION = Path("/usr/local/Ascend/driver/version.info")


def main() -> None:
    """Run the examination named on the command line."""
    die_with_parent(signal.SIGKILL)
    result = os.dup(1)
    os.dup2(2, 1)  # vendors' libraries print to stdout
    facts = _EXAMINATIONS[sys.argv[1]](**json.loads(sys.argv[2]))
    with open(result, "w") as file:
        json.dump(facts, file)
    sys.stdout.flush()
    os._exit(0)  # a vendor's library may hang when it is unloaded


def examine_storage(run_dir: str) -> Storage:
    """Write to the file system of a run folder, and leave nothing there."""
    folder = Path(run_dir).expanduser().absolute()
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    error = ""
    free = 0
    try:
        free = shutil.disk_usage(folder).free
        if not folder.is_dir():
            raise NotADirectoryError(0, "not a directory")
        # The file has no name, so nothing remains if this process is killed.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        error = failure.strerror or str(failure)
    return Storage(folder=str(folder), free_bytes=free, error=error)


def _examine_devices(
    devices: str, share: bool, vendor_library: bool, host: str, **place: int
) -> dict[str, Any]:
    """Choose this rank's device as training does.

    Training also knows the other ranks' devices; a later check compares them.
    """
    import psutil

    from kaitian_mpi.config.factory import one_line
    from kaitian_mpi.devices import known_kinds
    from kaitian_mpi.devices.cpu import available_bytes
    from kaitian_mpi.errors import UserError

    kinds = known_kinds()
    without_library = {
        name: fault
        for name, device in kinds.devices.items()
        if kinds.counts[name] and (fault := device.missing_library())
    }
    facts = Devices(
        kinds=tuple(
            Kind(
                name=name,
                count=kinds.counts[name],
                is_host=device.is_host,
                library=device.usable_library(),
            )
            for name, device in kinds.devices.items()
        ),
        faults={**kinds.faults, **without_library},
        requested=devices,
        shares=share,
        vendor_library=vendor_library,
        ram_bytes=int(psutil.virtual_memory().total),
        ram_free_bytes=available_bytes(),
        drivers=loaded_drivers(),
    )
    try:
        facts = replace(facts, seen=kinds.accelerators())
        return asdict(_with_device(facts, kinds, place["local_rank"], place["local_size"], host))
    except UserError as failure:
        return asdict(replace(facts, error=str(failure)))
    except Exception as failure:  # whatever a vendor's code raises
        return asdict(replace(facts, error=one_line(failure)))


def _with_device(facts: Devices, known: Kinds, rank: int, size: int, host: str) -> Devices:
    import torch

    from kaitian_mpi.devices.choice import choose_device

    request = facts.requested
    if request == "auto" and any(len(ids) < size for ids in facts.seen.values()):
        rank, size = 0, 1  # each rank may see only its own device
    choice = choose_device(
        request, known.counts, rank, size, host, known.unusable, share=facts.shares
    )
    device = known.devices[choice.kind]
    index = choice.index
    device.select(index)
    torch.empty(1, device=device.torch_device(index))  # fails if the device does not work
    return replace(
        facts,
        chosen=str(device.torch_device(index)),
        physical_id=device.physical_id(index),
        kind=device.kind,
        name=device.name(index),
        memory_bytes=device.memory_bytes(index),
        is_host=device.is_host,
    )


def loaded_drivers() -> dict[str, str]:
    """Return the accelerators' kernel drivers that are loaded, and their versions if known."""
    present = [name for name in _DRIVERS if (_MODULES / name).is_dir()]
    versions = {name: _read(_MODULES / name / "version") for name in present}
    if version := re.search(r"(?im)^\s*version\s*=\s*(\S+)", _read(_ASCEND_VERSION)):
        versions["ascend"] = version[1]
    return versions


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_EXAMINATIONS: Mapping[str, Callable[..., Any]] = {
    "storage": lambda run_dir: asdict(examine_storage(run_dir)),
    "devices": _examine_devices,
}

if __name__ == "__main__":
    main()
