"""Chooses each rank's device from what its host has; hides the others from ranks on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from kaitian_mpi.errors import UserError

SHARE_VARIABLE = "KAITIAN_SHARE_DEVICE"
"""The environment variable that, if it is 1, acts as `--share-device`."""
LIBRARY_VARIABLE = "KAITIAN_VENDOR_LIBRARY"
"""The environment variable that, if it is 0, acts as `--no-vendor-library`."""

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


@dataclass(frozen=True)
class Choice:
    """The device chosen for a rank."""

    kind: str
    index: int


Inventory = Mapping[str, Sequence[str]]
"""The accelerators that a rank sees: physical ids by kind and index, in order of preference."""


def choose_device(
    request: str,
    counts: Mapping[str, int],
    local_rank: int,
    local_size: int,
    host: str,
    faults: Mapping[str, str] = MappingProxyType({}),
    *,
    inventories: Sequence[Inventory] = (),
    share: bool = False,
) -> Choice:
    """Choose this rank's device by `--devices`, or raise a `UserError`.

    `counts` are the host's devices by kind, in order of preference; `faults` says why a kind cannot
    be used; `inventories` is what each of the host's ranks sees, empty for what this one does.
    """
    if request == "auto":
        own = {kind: [f"{i}" for i in range(n)] for kind, n in counts.items() if kind != "cpu"}
        choices = assign_devices(inventories or [own] * local_size, host, share)
        return choices[local_rank] or Choice("cpu", local_rank)
    if request == "cpu":
        return Choice("cpu", local_rank)
    entries = request.split(",")
    if len(entries) < local_size:
        raise UserError(
            f"--devices {request} is too short for the {local_size} ranks on {host}; list a "
            "device for each, or start fewer ranks there"
        )
    if not all(map(str.strip, entries)):
        raise UserError(
            f"--devices {request!r}: a device is missing beside a comma; write one there, such as "
            "cpu"
        )
    choice = _parse(entries[local_rank], counts, faults)  # others may be of a kind not known here
    if choice.kind != "cpu" and choice.index >= counts[choice.kind]:
        raise UserError(
            f"--devices {request}: local rank {local_rank} on {host} asks for "
            f"{choice.kind}:{choice.index}, but {_inventory(counts, host)}"
        )
    return choice


def assign_devices(
    inventories: Sequence[Inventory], host: str, share: bool = False
) -> list[Choice | None]:
    """Give each rank of a host a device of its own, or share; None to one that sees none."""
    seen = [[(kind, each) for kind, ids in rank.items() for each in ids] for rank in inventories]
    choices: list[Choice | None] = [None] * len(seen)
    users: dict[tuple[str, str], list[int]] = {each: [] for devices in seen for each in devices}
    # The ranks' own lists may overlap: a device that few ranks see is taken first.
    viewers = Counter(each for devices in seen for each in devices)
    for rank in sorted(range(len(seen)), key=lambda rank: len(seen[rank])):
        if seen[rank]:
            kind, device = given = min(
                seen[rank], key=lambda each: (len(users[each]), viewers[each])
            )
            users[given].append(rank)
            choices[rank] = Choice(kind, inventories[rank][kind].index(device))
    if not share and any(len(ranks) > 1 for ranks in users.values()):
        owners = [ranks[0] for ranks in users.values() if ranks]
        named = [each if rank in owners else None for rank, each in enumerate(choices)]
        example = ",".join(f"{each.kind}:{each.index}" if each else "cpu" for each in named)
        raise UserError(
            f"{len(seen)} ranks on {host}, but {_inventory(Counter(k for k, _ in users), host)}; "
            f"start {len(owners)} ranks there, or name each one's device, such as --devices "
            f"{example}, or let ranks share a device with --share-device"
        )
    return choices


def _parse(entry: str, counts: Mapping[str, int], faults: Mapping[str, str]) -> Choice:
    kind, _, index = entry.strip().partition(":")
    if kind in faults and kind not in counts:
        raise UserError(f"--devices {entry}: {faults[kind]}")
    if kind not in counts or not (index or "0").isdigit():
        raise UserError(
            f"--devices: {entry!r} is not a device; give auto, or entries such as cuda:0 or cpu, "
            f"of the kinds {', '.join(counts)}"
        )
    if kind == "cpu" and int(index or 0):
        raise UserError(f"--devices: {entry!r}: CPUs have no numbers; write cpu")
    return Choice(kind, int(index or 0))


def _inventory(counts: Mapping[str, int], host: str) -> str:
    found = [f"{n} {kind}" for kind, n in counts.items() if kind != "cpu" and n]
    return f"{host} has {', '.join(found) if found else 'no accelerator'}"


def declines_library(vendor_library: bool, environ: Mapping[str, str]) -> bool:
    """Return whether this rank wants no vendor's library to be used, by its flag or the variable.

    Raises a `UserError` if the variable is neither 0 nor 1.
    """
    given = environ.get(LIBRARY_VARIABLE, "").strip()
    if given not in ("", "0", "1"):
        raise UserError(
            f"{LIBRARY_VARIABLE} is {given!r}; set it to 0, so that no vendor's library is used, "
            "or to 1"
        )
    return given == "0" or not vendor_library


def hide_accelerators(request: str, local_rank: int, local_size: int) -> dict[str, str]:
    """Return the variables that hide every accelerator from a rank that is to use the CPU.

    Those of other packages' kinds too, without importing these.
    """
    entries = ["cpu"] * local_size if request == "cpu" else request.split(",")
    if local_size > len(entries) or entries[local_rank].strip() != "cpu":
        return {}
    from importlib.metadata import entry_points  # late, as in the registry

    added = {entry.name: (entry.value,) for entry in entry_points(group=GROUP)}
    return dict.fromkeys(chain.from_iterable({**added, **VISIBILITY}.values()), NO_DEVICE)
