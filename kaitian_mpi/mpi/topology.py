"""Topology: the ranks' devices, their groups by device kind, and the communicators of both."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.ulfm import track_comm

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class RankInfo:
    """A rank's host and device, as known to all ranks."""

    world_rank: int
    local_rank: int
    host: str
    kind: str
    """Device kind, or the emulated label."""
    device: str
    """The torch device, such as `cuda:0`."""
    device_name: str
    memory_bytes: int
    torch_version: str
    emulated: bool = False
    """Whether the kind is emulated by a CPU rank."""
    physical_device: str = ""
    """Identifies the physical device among all of the job; empty for a CPU."""
    library: str = ""
    """The collective library of the rank's vendor; empty without one."""
    library_device: str = ""
    """What that library takes for the physical device, if it is not that: a GPU, of a part."""
    python_version: str = ""
    node: int = 0
    """The number of its host. The name need not differ between hosts, as in containers."""

    def __str__(self) -> str:
        """Return the rank's name in messages, such as `rank 2 (node-b, cuda:0)`.

        The kind is added if it differs from the device type: `rank 2 (node-b, cpu, mlu)`.
        """
        shown = () if self.kind == self.device.partition(":")[0] else (self.kind,)
        return f"rank {self.world_rank} ({', '.join((self.host, self.device, *shown))})"

    @property
    def is_on_host(self) -> bool:
        """Whether its tensors are in host memory."""
        return self.device.partition(":")[0] == "cpu"

    @property
    def place(self) -> str:
        """Identifies the rank's host and device across jobs, where its rank may differ."""
        return f"{self.host}/{self.local_rank}/{self.kind}/{self.device}"


@dataclass(frozen=True)
class Group:
    """The ranks of one device kind, in rank order. The first one is the leader."""

    kind: str
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that communicates with the other groups if one rank suffices."""
        return self.ranks[0]


def plan_groups(kinds: Sequence[str]) -> tuple[Group, ...]:
    """Group ranks 0, 1, … by these device kinds; groups are ordered by their first rank."""
    members: dict[str, list[int]] = {}
    for rank, kind in enumerate(kinds):
        members.setdefault(kind, []).append(rank)
    return tuple(Group(kind, tuple(ranks)) for kind, ranks in members.items())


def shared_devices(infos: Sequence[RankInfo]) -> list[list[RankInfo]]:
    """Return the ranks that share a device with others of their group, device by device.

    A vendor's library refuses such a group; groups without a library are left out.
    """
    users: dict[tuple[str, str], list[RankInfo]] = {}
    for info in infos:
        device = info.library_device or info.physical_device
        if device and info.library:
            users.setdefault((info.kind, device), []).append(info)
    return [sharing for sharing in users.values() if len(sharing) > 1]


def check_own_devices(infos: Sequence[RankInfo]) -> None:
    """Check that no two ranks of a group share a device; all ranks have the same infos.

    Raises:
        AgreedError: some do.
    """
    faults = []
    for sharing in shared_devices(infos):
        first = sharing[0]
        device = (first.library_device or first.physical_device).rpartition("/")[2]
        faults.append(
            f"{' and '.join(map(str, sharing))} share one device ({device}), needed one for each, "
            f"since {first.library} refuses such a group"
        )
    if faults:
        raise AgreedError(
            f"{'; '.join(faults)}; start fewer ranks, name other devices with --devices, or give "
            "--share-device, with which these ranks communicate through host memory"
        )


@dataclass(frozen=True)
class GroupComms:
    """The communicators of one world of ranks, split by device kind."""

    world: MPI.Intracomm
    groups: tuple[Group, ...]
    group: MPI.Comm
    """The ranks of this rank's own kind."""
    lane: MPI.Comm | None
    """This rank's lane: the ranks that have the same group rank, one per group; None if some group
    is too small to have this group rank. Lane 0 connects the groups' leaders."""
    messages: MPI.Comm
    """The same ranks as `world`, for point-to-point messages."""
    lanes: int
    """The number of lanes: the size of the smallest group."""

    @property
    def own(self) -> Group:
        """This rank's group."""
        return group_of(self.groups, self.world.rank)

    def free(self) -> None:
        """Free the communicators. Collective."""
        for comm in (self.lane, self.group, self.messages, self.world):
            if comm is not None:
                comm.Free()


def group_of(groups: Sequence[Group], rank: int) -> Group:
    """Return the group that a world rank is in."""
    return next(group for group in groups if rank in group.ranks)


def subset(base: MPI.Intracomm, members: Sequence[int], name: str) -> MPI.Intracomm:
    """Create a communicator of these ranks of `base`, in this order.

    Collective over the members only, which is why they need to pass the same `name`.
    """
    from mpi4py import MPI

    tag = zlib.crc32(name.encode()) % tags.COUNT
    comm = base.Create_group(base.group.Incl(list(members)), tag)
    assert isinstance(comm, MPI.Intracomm)
    return comm


def translate_ranks(comm: MPI.Intracomm, world: MPI.Intracomm) -> list[int]:
    """Return the rank in `world` of each rank of `comm`."""
    from mpi4py import MPI

    return list(MPI.Group.Translate_ranks(comm.group, range(comm.size), world.group))


def split_by_kind(world: MPI.Intracomm, kinds: Sequence[str]) -> GroupComms:
    """Split `world` into groups by device kind and lanes across them. Collective.

    Args:
        world: a communicator for the groups' exclusive use; collectives will be called on it.
        kinds: the device kind of each rank of `world`.
    """
    from mpi4py import MPI

    groups = plan_groups(kinds)
    lanes = min(len(group.ranks) for group in groups)
    own = groups.index(group_of(groups, world.rank))
    group = world.Split(own, world.rank)
    in_lane = group.rank < lanes
    lane = world.Split(group.rank if in_lane else MPI.UNDEFINED, own)
    messages = world.Dup()
    for comm in (world, group, messages, *([lane] if in_lane else [])):
        track_comm(comm)
    return GroupComms(world, groups, group, lane if in_lane else None, messages, lanes)
