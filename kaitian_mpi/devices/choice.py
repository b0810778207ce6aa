"""Chooses each rank's device on its host; hides accelerators from ranks on the CPU."""

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
"""The environment variables that list the visible devices of a kind, read when its driver starts.
If a kind has several, the first that is set applies."""
NO_DEVICE = "-1"
"""The value of these variables that hides all devices: a list ends at an invalid device."""
GROUP = "kaitian_mpi.visibility"
"""The entry point group by which other packages name the variable of a kind: kind = VARIABLE."""


@dataclass(frozen=True)
class Choice:
    """The device chosen for a rank."""

    kind: str
    index: int


Inventory = Mapping[str, Sequence[str]]
"""A rank's visible accelerators: physical IDs by kind and index, in order of preference."""


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
    """Choose this rank's device by `--devices`.

    Args:
        request: the value of `--devices`.
        counts: the host's number of devices of each kind, in order of preference.
        local_rank: this rank's number on its host.
        local_size: the number of ranks on the host.
        host: the host's name, for errors.
        faults: the reason for each kind that cannot be used.
        inventories: the visible accelerators of each of the host's ranks; if empty, all see the
            devices in `counts`.
        share: whether several ranks may use one device.

    Raises:
        UserError: there is no such device, or there are too few.
    """
    if request == "auto":
        visible = {kind: [f"{i}" for i in range(n)] for kind, n in counts.items() if kind != "cpu"}
        choices = assign_devices(inventories or [visible] * local_size, host, share)
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
    # Other entries may be of kinds unknown here.
    choice = _parse(entries[local_rank], counts, faults)
    if choice.kind != "cpu" and choice.index >= counts[choice.kind]:
        raise UserError(
            f"--devices {request}: local rank {local_rank} on {host} asks for "
            f"{choice.kind}:{choice.index}, but {_inventory(counts, host)}; name another device"
        )
    return choice


def assign_devices(
    inventories: Sequence[Inventory], host: str, share: bool = False
) -> list[Choice | None]:
    """Assign each rank of a host a device of its own, or a shared one; None if it sees none.

    Raises:
        UserError: ranks would have to share a device, but `share` is False.
    """
    visible = [
        [(kind, physical_id) for kind, ids in inventory.items() for physical_id in ids]
        for inventory in inventories
    ]
    choices: list[Choice | None] = [None] * len(visible)
    users: dict[tuple[str, str], list[int]] = {
        device: [] for rank_devices in visible for device in rank_devices
    }
    # The ranks may see different devices: a device that few ranks see is taken first.
    viewers = Counter(device for rank_devices in visible for device in rank_devices)
    for rank in sorted(range(len(visible)), key=lambda rank: len(visible[rank])):
        if visible[rank]:
            chosen = min(visible[rank], key=lambda device: (len(users[device]), viewers[device]))
            users[chosen].append(rank)
            kind, physical_id = chosen
            choices[rank] = Choice(kind, inventories[rank][kind].index(physical_id))
    if not share and any(len(ranks) > 1 for ranks in users.values()):
        owners = [ranks[0] for ranks in users.values() if ranks]
        entries = []
        for rank, choice in enumerate(choices):
            entries.append(f"{choice.kind}:{choice.index}" if choice and rank in owners else "cpu")
        example = ",".join(entries)
        counts = Counter(kind for kind, _ in users)
        raise UserError(
            f"{len(visible)} ranks on {host}, but {_inventory(counts, host)}; "
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
    devices = [f"{n} {kind}" for kind, n in counts.items() if kind != "cpu" and n]
    return f"{host} has {', '.join(devices) if devices else 'no accelerator'}"


def declines_library(vendor_library: bool, environ: Mapping[str, str]) -> bool:
    """Return whether a flag or variable tells this rank not to use a vendor's library.

    Raises:
        UserError: the variable is neither 0 nor 1.
    """
    text = environ.get(LIBRARY_VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise UserError(
            f"{LIBRARY_VARIABLE} is {text!r}; set it to 0, so that no vendor's library is used, "
            "or to 1"
        )
    return text == "0" or not vendor_library


def hide_accelerators(request: str, local_rank: int, local_size: int) -> dict[str, str]:
    """Return the variables that hide all accelerators from a rank that uses the CPU.

    They include those of other packages' kinds, which are not imported.
    """
    entries = ["cpu"] * local_size if request == "cpu" else request.split(",")
    if local_size > len(entries) or entries[local_rank].strip() != "cpu":
        return {}
    from importlib.metadata import entry_points  # late, as in the registry

    added = {entry.name: (entry.value,) for entry in entry_points(group=GROUP)}
    return dict.fromkeys(chain.from_iterable({**added, **VISIBILITY}.values()), NO_DEVICE)
