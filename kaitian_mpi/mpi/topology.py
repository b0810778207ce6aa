"""Topology: the ranks' devices, how these are grouped, and the communicators of all that."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.config.kaitian_train import GROUPINGS
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values, join_errors
from kaitian_mpi.preflight.verdict import ranks_by
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive
from kaitian_mpi.runtime.ulfm import tolerating_loss, track_comm

if TYPE_CHECKING:
    from mpi4py import MPI

_lock = threading.Lock()
_to_free: list[tuple[MPI.Request, GroupComms]] = []  # once the request is done

GROUP_VARIABLE = "KAITIAN_GROUP_BY"
"""The environment variable that acts as `--group-by`."""


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
    slowdown: str = ""
    """The emulated slowdown, such as `3x, 1x from step 90`; empty if there is none."""
    emulated_memory: bool = False
    """Whether its memory is an emulated limit."""
    physical_device: str = ""
    """Identifies the physical device among all of the job; empty for a CPU."""
    library: str = ""
    """The collective library of the rank's vendor; empty without one."""
    python_version: str = ""
    node: int = 0
    """The number of its host. The name need not differ between hosts, as in containers."""
    cpu_capability: str = ""
    """The instructions that torch's kernels use on the CPU, such as `AVX2`; else empty."""

    def __str__(self) -> str:
        """Return `rank 2 (node-b, cuda:0)`, with the kind if it is not the device's type."""
        shown = () if self.kind == self.device.partition(":")[0] else (self.kind,)
        return f"rank {self.world_rank} ({', '.join((self.host, self.device, *shown))})"

    @property
    def is_on_host(self) -> bool:
        """Whether its tensors are in host memory."""
        return self.device.partition(":")[0] == "cpu"

    @property
    def rounding(self) -> tuple[str, ...]:
        """Identifies how its kernels round: equal for two ranks that compute the same bits."""
        return self.kind, self.device_name, self.cpu_capability, self.torch_version

    @property
    def place(self) -> str:
        """Identifies the rank's host and device across jobs, where its rank may differ."""
        return f"{self.host}/{self.local_rank}/{self.kind}/{self.device}"


@dataclass(frozen=True)
class Group:
    """The ranks of one device kind, or of one on one host, in rank order; the first one leads."""

    kind: str
    ranks: tuple[int, ...]
    node: int | None = None
    """The number of its host, if groups are by kind and host."""

    @property
    def leader(self) -> int:
        """The rank that communicates with the other groups if one rank suffices."""
        return self.ranks[0]


def plan_groups(
    kinds: Sequence[str], nodes: Sequence[int | None] | None = None
) -> tuple[Group, ...]:
    """Group ranks by kind or, given their hosts, by kind and host, in order of first ranks."""
    members = ranks_by(dict(enumerate(zip(kinds, nodes or [None] * len(kinds), strict=True))))
    return tuple(Group(kind, tuple(ranks), node) for (kind, node), ranks in members.items())


def may_group_by_host(kinds: Sequence[str], nodes: Sequence[int]) -> bool:
    """Return whether groups by kind and host may be faster than groups by kind."""
    by_kind = plan_groups(kinds)
    by_host = plan_groups(kinds, nodes)
    return 1 < len(by_kind) < len(by_host) < len(kinds)


@dataclass
class CommunicationSettings:
    """How all process groups of a process communicate; must be the same on every rank."""

    relay_memory_mb: int = TrainingConfig.relay_memory_mb
    """The host memory of one process group's buffers between device and MPI, in MB."""
    relay_dtype: str = TrainingConfig.relay_dtype
    """The dtype in which float32 gradients cross between kinds, `fp32` or `bf16`."""
    network_allreduce: str = TrainingConfig.network_allreduce
    """The algorithm that reduces host memory between hosts: `auto`, `mpi` or a name."""
    wire: str = TrainingConfig.wire
    """The format of gradients between hosts: `fp32`, `bf16`, `int8` or `int4`."""
    group_by: str = "auto"
    """The grouping of ranks, as `--group-by`; fixed once the job has started."""
    vendor_library: bool = True
    """Whether vendors' libraries are used, as `--vendor-library`; fixed in the same way."""

    def adopt(self, config: TrainingConfig) -> None:
        self.relay_memory_mb = config.relay_memory_mb
        self.relay_dtype = config.relay_dtype
        self.network_allreduce = config.network_allreduce
        self.wire = config.wire

    def describe(self) -> dict[str, Any]:
        """Return the entry `relay` of `summary.json`; `wire` is an entry of its own."""
        return {
            "memory_mb": self.relay_memory_mb,
            "dtype": self.relay_dtype,
            "network_allreduce": self.network_allreduce,
            "group_by": self.group_by,
            "vendor_library": self.vendor_library,
        }


def agree_on_settings(comm: MPI.Comm, group_by: str = "auto") -> CommunicationSettings:
    """Return the settings with which a job starts. Collective.

    A grouping that only some ranks ask for, as by their environment variable, is that of all.

    Raises:
        AgreedError: the ranks ask for different groupings, or one that does not exist.
    """
    requested = group_by
    if group_by == "auto":
        requested = os.environ.get(GROUP_VARIABLE, "").strip() or "auto"
    values = gather_values(comm, requested)
    groupings = sorted({value for value in values if value != "auto"})
    if len(groupings) > 1 or not {*groupings} <= {*GROUPINGS}:
        given_by = join_errors([repr(value) if value != "auto" else "" for value in values])
        raise AgreedError(
            f"--group-by or {GROUP_VARIABLE} is {given_by}; give every rank the same, one of "
            f"{', '.join(GROUPINGS)}"
        )
    return CommunicationSettings(group_by=groupings[0] if groupings else "auto")


def shared_devices(infos: Sequence[RankInfo]) -> list[list[RankInfo]]:
    """Return the ranks of each device that several of one kind have, if it has a library."""
    users: dict[tuple[str, str], list[RankInfo]] = {}
    for info in infos:
        if info.physical_device and info.library:
            users.setdefault((info.kind, info.physical_device), []).append(info)
    return [sharing for sharing in users.values() if len(sharing) > 1]


def are_joined_by_library(infos: Sequence[RankInfo]) -> bool:
    """Return whether ranks are of one kind, with a library and a device each."""
    is_one_kind = len({(info.kind, info.library) for info in infos}) == 1
    return is_one_kind and bool(infos[0].library) and not shared_devices(infos)


def check_own_devices(infos: Sequence[RankInfo]) -> None:
    """Raise an `AgreedError` if two ranks of a group share a device; all have the same infos."""
    faults = []
    for sharing in shared_devices(infos):
        first = sharing[0]
        device = first.physical_device.rpartition("/")[2]
        faults.append(
            f"{' and '.join(map(str, sharing))} share one device ({device}), which {first.library} "
            "refuses within a group"
        )
    if faults:
        raise AgreedError(
            f"{'; '.join(faults)}; start fewer ranks, name other devices with --devices, or give "
            "--share-device, with which these ranks communicate through host memory"
        )


@dataclass(frozen=True)
class GroupComms:
    """The communicators of one world of ranks, split into groups."""

    world: MPI.Intracomm
    groups: tuple[Group, ...]
    group: MPI.Comm
    """The ranks of this rank's own group."""
    lane: MPI.Comm | None
    """This rank's lane: the ranks that have the same group rank, one per group; None if some group
    is too small to have this group rank. Lane 0 connects the groups' leaders."""
    messages: MPI.Comm
    """The same ranks as `world`, for point-to-point messages."""
    lanes: int
    """The number of lanes: the size of the smallest group."""
    by_host: GroupComms | None = None
    """The same world in groups by kind and host, if these are an alternative to groups by kind."""

    @property
    def own(self) -> Group:
        return group_of(self.groups, self.world.rank)

    def free(self) -> None:
        """Free the communicators. Collective."""
        finer = () if self.by_host is None else (self.by_host.lane, self.by_host.group)
        for comm in (*finer, self.lane, self.group, self.messages, self.world):
            if comm is not None:
                comm.Free()


def group_of(groups: Sequence[Group], rank: int) -> Group:
    """Return the group that a world rank is in."""
    return next(group for group in groups if rank in group.ranks)


def subset(base: MPI.Intracomm, members: Sequence[int], name: str) -> MPI.Intracomm:
    """Create a communicator of these ranks of `base`, in this order. Collective over them alone."""
    tag = zlib.crc32(name.encode()) % tags.COUNT
    return cast("MPI.Intracomm", base.Create_group(base.group.Incl(list(members)), tag))


def translate_ranks(comm: MPI.Intracomm, world: MPI.Intracomm) -> list[int]:
    """Return the rank in `world` of each rank of `comm`."""
    return comm.group.Translate_ranks(group=world.group)


def split_into_groups(
    world: MPI.Intracomm, kinds: Sequence[str], nodes: Sequence[int], group_by: str
) -> GroupComms:
    """Split `world` into groups and lanes; the result frees it. Collective."""
    messages = world.Dup()
    for comm in (world, messages):
        track_comm(comm)
    if group_by == "kind-and-host":
        return _split(world, messages, plan_groups(kinds, nodes))
    by_host = None
    if group_by == "auto" and may_group_by_host(kinds, nodes):
        by_host = _split(world, messages, plan_groups(kinds, nodes))
    return _split(world, messages, plan_groups(kinds), by_host)


def _split(
    world: MPI.Intracomm,
    messages: MPI.Comm,
    groups: tuple[Group, ...],
    by_host: GroupComms | None = None,
) -> GroupComms:
    from mpi4py import MPI

    lanes = min(len(group.ranks) for group in groups)
    group_index = groups.index(group_of(groups, world.rank))
    group = world.Split(group_index, world.rank)
    in_lane = group.rank < lanes
    lane = world.Split(group.rank if in_lane else MPI.UNDEFINED, group_index)
    for comm in (group, *([lane] if in_lane else [])):
        track_comm(comm)
    return GroupComms(world, groups, group, lane if in_lane else None, messages, lanes, by_host)


def free_when_unused(comms: GroupComms) -> None:
    """Free communicators once every rank has called this, by a nonblocking barrier."""
    free_unused_comms()
    with tolerating_loss(), _lock:
        _to_free.append((comms.messages.Ibarrier(), comms))


def free_unused_comms() -> None:
    """Free the communicators that no rank uses any longer. Not collective, does not block."""
    with _lock:
        _to_free[:] = [(request, comms) for request, comms in _to_free if _is_kept(request, comms)]


def _is_kept(request: MPI.Request, comms: GroupComms) -> bool:
    with tolerating_loss():
        if not request.Test():
            return True
        comms.free()
        return False
    keep_alive(request, comms)
    return False
