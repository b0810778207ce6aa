"""Hides accelerators from CPU ranks by vendors' variables, before torch and drivers are loaded."""

from __future__ import annotations

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
driver starts; of several, the first that is set counts."""
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
    request: str, local_rank: int, local_size: int, names: Mapping[str, Sequence[str]] = VISIBILITY
) -> dict[str, str]:
    """Return the variables that hide every accelerator from a rank that is to use the CPU.

    With `--devices auto`, only a rank that sees none uses the CPU.
    """
    entries = ["cpu"] * local_size if request == "cpu" else request.split(",")
    if local_size > len(entries) or entries[local_rank].strip() != "cpu":
        return {}
    return {name: NO_DEVICE for of_kind in names.values() for name in of_kind}
