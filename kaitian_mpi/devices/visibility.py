"""Shows each rank its own devices, by vendors' variables, before torch and drivers are loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

VISIBILITY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda": ("CUDA_VISIBLE_DEVICES",),
        "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
        "mlu": ("MLU_VISIBLE_DEVICES",),
        "musa": ("MUSA_VISIBLE_DEVICES",),
        "xpu": ("ZE_AFFINITY_MASK",),
    }
)
"""The environment variables that list the devices of a kind that a process sees, read when its
driver starts; of several, the first that is set counts.

Lists are only shortened here, never reordered: CANN's documentation of the variable for npu allows
ascending order alone, and the one for xpu has no order (intel/compute-runtime,
`ExecutionEnvironment::parseAffinityMask`, which also takes an empty list for all devices).
"""
NO_DEVICE = "-1"
"""The value of these variables that hides all devices: a list ends at what is no device."""
GROUP = "kaitian_mpi.visibility"
"""The entry point group by which other packages name the variable of a kind: kind = VARIABLE."""


def visibility_variables() -> dict[str, tuple[str, ...]]:
    """Return the variables of every kind, those of other packages too, without importing these."""
    from importlib.metadata import entry_points  # late, as in the registry

    added = {entry.name: (entry.value,) for entry in entry_points(group=GROUP)}
    return {**added, **VISIBILITY}


def hide_accelerators(
    request: str,
    local_rank: int,
    local_size: int,
    names: Mapping[str, Sequence[str]] = VISIBILITY,
) -> dict[str, str]:
    """Return the variables that hide every accelerator from a rank that is to use the CPU.

    Args:
        request: the value of `--devices`. With `auto`, only a rank that sees none uses the CPU.
        local_rank: the rank's number among those on its host.
        local_size: the number of ranks on the host.
        names: the variables of each kind.
    """
    entries = _given(request, local_size)
    if not entries or entries[local_rank][0] != "cpu":
        return {}
    return {name: NO_DEVICE for of_kind in names.values() for name in of_kind}


def narrow_list(
    request: str,
    local_rank: int,
    local_size: int,
    environ: Mapping[str, str],
    names: Mapping[str, Sequence[str]] = VISIBILITY,
) -> tuple[dict[str, str], tuple[int, ...]]:
    """Show a rank only what its host's ranks use of its kind, so that they are numbered from 0.

    Nothing changes where they are anyway, as `cuda:0` and `cuda:1` are.

    Args:
        request: as above, like the others.
        local_rank: likewise.
        local_size: likewise.
        environ: the environment, whose variables may list devices already.
        names: likewise.

    Returns:
        The variable to set, and the indices in the request of the devices that it lists; both are
        empty where nothing changes.
    """
    entries = _given(request, local_size)
    kind = entries[local_rank][0] if entries else ""
    used = sorted({index for each, index in entries if each == kind})
    if kind not in names or used == list(range(len(used))):
        return {}, ()
    name = next((each for each in names[kind] if each in environ), names[kind][0])
    listed = [each.strip() for each in environ.get(name, "").split(",")]
    if name not in environ:
        listed = [str(index) for index in range(used[-1] + 1)]
    elif name == "ZE_AFFINITY_MASK":  # its devices come in the driver's order
        listed.sort(key=lambda each: [int(part) for part in re.findall(r"\d+", each)])
    if used[-1] >= len(listed):  # which `choose_device` reports
        return {}, ()
    return {name: ",".join(listed[index] for index in used)}, tuple(used)


def _given(request: str, local_size: int) -> list[tuple[str, int]]:
    """Return kind and index of each rank's device; nothing if the request does not say them."""
    entries = request.split(",") if request != "cpu" else ["cpu"] * local_size
    found = [re.fullmatch(r"\s*(\w+)(?::(\d+))?\s*", entry) for entry in entries]
    devices = [(each[1], int(each[2] or 0)) for each in found if each]
    is_complete = len(devices) == len(entries) >= local_size and request != "auto"
    return devices[:local_size] if is_complete else []
