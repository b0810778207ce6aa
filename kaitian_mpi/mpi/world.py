"""The job as one rank sees it."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from kaitian_mpi.devices import Device, known_kinds
from kaitian_mpi.devices.choice import SHARE_VARIABLE, choose_device, declines_library
from kaitian_mpi.devices.emulation import (
    MEMORY_VARIABLE,
    Emulation,
    describe_slowdown,
    given_emulation,
    read_emulation,
)
from kaitian_mpi.errors import AgreedError, RankLostError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import (
    CommunicationSettings,
    Group,
    RankInfo,
    agree_on_settings,
    check_own_devices,
    group_of,
    plan_groups,
    translate_ranks,
)
from kaitian_mpi.preflight.facts import (
    JobFacts,
    OtherVersionError,
    RankFacts,
    collect,
    collect_mpi,
    version_in,
)
from kaitian_mpi.preflight.job_checks import check_libraries, run_checks
from kaitian_mpi.preflight.verdict import Level, by_value, ranks_by, ranks_text
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.polling import set_core_sharing
from kaitian_mpi.runtime.system import set_default_threads, usable_cores
from kaitian_mpi.runtime.ulfm import loss_detected_within, shrink, track_comm

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.store import MPIStore

_log = logging.getLogger(__name__)

_PATIENCE_SEC = 0.5


@dataclass(frozen=True)
class World:
    """All ranks of the job, and this rank's device."""

    comm: MPI.Intracomm
    """The package's own communicator over all ranks."""
    infos: tuple[RankInfo, ...]
    """Each rank's report about itself, by world rank."""
    device_kind: Device
    """The operations of this rank's kind of device."""
    device_index: int
    """This rank's device among those of its kind on the host."""
    threads: int
    """CPU threads that this rank computes with."""
    started: int
    """The number of ranks that mpirun started."""
    emulation: Emulation
    """The emulation, by the numbers of the ranks that mpirun started."""
    store: MPIStore
    """The job's store, until the last rank has departed; also of worlds made from this one."""
    communication: CommunicationSettings = field(default_factory=CommunicationSettings)
    """How all process groups of this process communicate."""

    @property
    def rank(self) -> int:
        """This process's world rank."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.comm.size

    @property
    def info(self) -> RankInfo:
        """This rank's report about itself."""
        return self.infos[self.rank]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The device kind of every rank."""
        return tuple(info.kind for info in self.infos)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups by device kind; with `--group-by kind-and-host`, by kind and host."""
        is_by_host = self.communication.group_by == "kind-and-host"
        return plan_groups(self.kinds, [info.node for info in self.infos] if is_by_host else None)

    @property
    def group(self) -> Group:
        """This rank's group."""
        return group_of(self.groups, self.rank)

    @property
    def device(self) -> torch.device:
        """This rank's device, for torch."""
        return self.device_kind.torch_device(self.device_index)

    def synchronize(self) -> None:
        """Wait until this rank's device has done all it was given."""
        self.device_kind.synchronize(self.device_index)


_current: World | None = None


def current_world() -> World | None:
    """Return the world of the next default process group, for what torch calls; None before MPI."""
    return _current


def set_current_world(world: World) -> World:
    """Let the next default process group be of these ranks; return them."""
    global _current
    _current = world
    return world


def join_world(
    comm: MPI.Intracomm,
    devices: str = "auto",
    emulate_kinds: str = "",
    emulate_slowdown: str = "",
    share_device: bool = False,
    group_by: str = "auto",
    vendor_library: bool = True,
) -> World:
    """Choose this rank's device, and exchange the choices between all ranks. Collective.

    The settings are those of the flags; empty ones, and `auto`, are what the variables say. Raises
    an `AgreedError` where any rank cannot have its device.
    """
    world_comm = track_comm(comm.Dup())
    settings = given_emulation(emulate_kinds, emulate_slowdown)
    emulation = read_emulation(gather_values(world_comm, settings))
    communication = agree_on_settings(world_comm, group_by)
    device, index, info, shares = _take_device(world_comm, devices, share_device, emulation)
    facts = replace(collect(info.host, world_comm.rank), mpi=collect_mpi(world_comm))
    gathered = gather_values(world_comm, (asdict(info), asdict(facts), device.missing_library()))
    _check_before_job([rank_facts for _, rank_facts, _ in gathered], world_comm.rank)
    infos = tuple(RankInfo(**fields) for fields, _, _ in gathered)
    without_library = ranks_by(
        {rank: fault for rank, (_, _, fault) in enumerate(gathered) if fault}
    )
    if world_comm.rank == 0 and _current is None:
        for fault, ranks in without_library.items():
            _log.warning("%s: %s", ranks_text(ranks), fault)
    if declining := _declining_ranks(world_comm, vendor_library):
        if world_comm.rank == 0 and (_current is None or _current.communication.vendor_library):
            for verdict in check_libraries([info.library for info in infos], declining):
                _log.warning("%s", verdict)
        infos = tuple(replace(info, library="") for info in infos)
        communication = replace(communication, vendor_library=False)
    if not shares:
        check_own_devices(infos)
    store = _open_store(world_comm)
    is_new = _current is None or _current.emulation != emulation
    if emulation.describe() and world_comm.rank == 0 and is_new:
        # A variable may have been forgotten.
        level = logging.INFO if emulate_kinds or emulate_slowdown else logging.WARNING
        _log.log(level, "the job is emulated: %s", emulation.describe())
    threads = set_default_threads(share_cores(world_comm))
    size = world_comm.size
    return World(world_comm, infos, device, index, threads, size, emulation, store, communication)


def _open_store(comm: MPI.Intracomm) -> MPIStore:
    from kaitian_mpi.mpi.store import MPIStore  # MPI starts with the import

    if _current is None:
        return MPIStore(comm)
    _current.store.restart(comm)
    return _current.store


def _take_device(
    comm: MPI.Intracomm, request: str, share: bool, emulation: Emulation
) -> tuple[Device, int, RankInfo, bool]:
    """Choose this rank's device, and make it the process's current one. Collective."""
    from mpi4py import MPI

    host = MPI.Get_processor_name()
    launch = read_launch(os.environ)
    share = share or os.environ.get(SHARE_VARIABLE, "") == "1"
    with agree_on_errors(comm):
        kinds = known_kinds()
        seen = kinds.accelerators() if request == "auto" else {}
    node, inventories, share = _exchange_visible(comm, launch.local_rank, seen, share)
    with agree_on_errors(comm):
        choice = choose_device(
            request,
            kinds.counts,
            launch.local_rank,
            launch.local_size,
            host,
            kinds.unusable,
            inventories=inventories if len(inventories) == launch.local_size else (),
            share=share,
        )
        if request == "auto" and launch.local_rank == 0:
            for fault in kinds.faults.values():
                _log.warning("%s", fault)
        device = kinds.devices[choice.kind]
        index = choice.index
        device.select(index)
        device = emulation.wrap(device, comm.rank, str(device.torch_device(index)))
        info = _describe_rank(comm.rank, host, node, device, index, emulation)
    # A fault would have left the block above on every rank, so its names are bound.
    return device, index, info, share


def _describe_rank(
    rank: int, host: str, node: int, device: Device, index: int, emulation: Emulation
) -> RankInfo:
    physical = device.physical_id(index)
    return RankInfo(
        world_rank=rank,
        local_rank=read_launch(os.environ).local_rank,
        host=host,
        kind=device.kind,
        device=str(device.torch_device(index)),
        device_name=device.name(index),
        memory_bytes=device.memory_bytes(index),
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        emulated=bool(emulation.labels),
        slowdown=describe_slowdown(emulation.schedules[rank]),
        physical_device=f"{node}/{device.kind}/{physical}" if physical else "",
        library=device.usable_library(),
        node=node,
        cpu_capability=torch.backends.cpu.get_cpu_capability() if device.is_host else "",
    )


def _exchange_visible(
    comm: MPI.Intracomm, local_rank: int, seen: Mapping[str, Sequence[str]], share: bool
) -> tuple[int, list[dict[str, list[str]]], bool]:
    """Tell the other ranks which accelerators this one sees. Collective.

    Returns this node's number, since hosts may share a name; what each of its ranks sees, by local
    rank; and whether any rank of the job may share a device.
    """
    node = _gather_on_host(comm, comm.rank)[0]
    on_node: list[tuple[int, Any]] = []
    any_shares = False
    for other_node, other_rank, other_seen, shares in gather_values(
        comm, (node, local_rank, seen, share)
    ):
        any_shares |= bool(shares)
        if other_node == node:
            on_node.append((int(other_rank), other_seen))
    on_node.sort(key=lambda item: item[0])
    return node, [other_seen for _, other_seen in on_node], any_shares


def _check_before_job(facts: Sequence[dict[str, Any]], rank: int) -> None:
    """Make the checks of `kaitian-doctor` that cost nothing; all ranks have the same facts."""
    try:
        ranks = tuple(map(RankFacts.from_json, facts))
    except OtherVersionError:
        versions = by_value(dict(enumerate(map(version_in, facts))))
        raise AgreedError(
            f"the ranks run different builds of kaitian-mpi ({versions}); install the same one on "
            "every host"
        ) from None
    problems = []
    for _, verdict in run_checks(JobFacts(ranks=ranks)):
        if verdict.level is Level.PROBLEM:
            problems.append(str(verdict))
        elif verdict.level is Level.WARNING and rank == 0 and _current is None:
            _log.warning("%s", verdict)
    if problems:
        raise AgreedError("; ".join(problems))


def _declining_ranks(comm: MPI.Intracomm, vendor_library: bool) -> list[int]:
    """Return the ranks that want no vendor's library to be used. Collective."""
    with agree_on_errors(comm):
        declines = declines_library(vendor_library, os.environ)
    return [
        rank for rank, rank_declines in enumerate(gather_values(comm, declines)) if rank_declines
    ]


def slowed_as(world: World, slowdown: str) -> World:
    """Return the world with the slowdowns that a `Training` was given. Collective."""
    if not any(gather_values(world.comm, slowdown)):
        return world
    with agree_on_errors(world.comm):
        emulation = world.emulation.with_slowdown(slowdown)
        place, calls = (world.info.world_rank, world.info.device), world.device_kind.calls
        device = emulation.wrap(world.device_kind, *place, calls)
    slowdowns = [*map(describe_slowdown, emulation.schedules)]
    infos = [replace(info, slowdown=slowdowns[info.world_rank]) for info in world.infos]
    return replace(world, emulation=emulation, device_kind=device, infos=tuple(infos))


def limited_as(world: World, memory: str, present: int = 0) -> World:
    """Return the world with the memory limits of `--emulate-memory`. Collective.

    `present` bytes count that this process has already: see `LimitedDevice`.
    """
    memory = memory or os.environ.get(MEMORY_VARIABLE, "")
    if not any(gather_values(world.comm, memory)):
        return world
    from kaitian_mpi.devices.memory_limit import limit_memory

    with agree_on_errors(world.comm):
        world_rank = world.info.world_rank
        device, limits = limit_memory(world.device_kind, memory, world_rank, world.started, present)
    infos = [
        replace(info, memory_bytes=limit, emulated_memory=True) if limit else info
        for info in world.infos
        for limit in [limits[info.world_rank]]
    ]
    return replace(world, device_kind=device, infos=tuple(infos))


def keep_ranks(world: World, ranks: Sequence[int]) -> World | None:
    """Return the world of some of the ranks, renumbered in order, None on others. Collective."""
    if world.store.link.is_closed:  # by the loss of a rank
        world.store.restart(world.comm)
    remains = world.rank in ranks
    comm = cast("MPI.Intracomm", world.comm.Split(0 if remains else 1, world.rank))
    if not remains:
        comm.Free()
        return None
    infos = tuple(world.infos[rank] for rank in ranks)
    threads = set_default_threads(share_cores(comm))
    return replace(world, comm=track_comm(comm), infos=infos, threads=threads)


def survivors_of(world: World) -> World:
    """Return the world of the surviving ranks, renumbered in order. Collective over those."""
    comm = track_comm(shrink(world.comm))
    infos = tuple(world.infos[rank] for rank in translate_ranks(comm, world.comm))
    return replace(world, comm=comm, infos=infos)


def finished_ranks(world: World) -> list[int]:
    """Return the ranks whose script has ended; none while the store does not answer."""
    if loss_detected_within(world.comm, 0):
        raise RankLostError("a rank is lost")
    give_up = time.monotonic() + _PATIENCE_SEC
    departed = world.store.departed(until=lambda: time.monotonic() > give_up)
    store_ranks = translate_ranks(world.comm, world.store.link.comm) if departed else []
    return [rank for rank, store_rank in enumerate(store_ranks) if store_rank in departed]


def share_cores(comm: MPI.Comm) -> int:
    """Return the number of threads that each rank of this host should use. Collective.

    Ranks that are more than their cores look less often while they wait.
    """
    usable = _gather_on_host(comm, sorted(usable_cores()))
    cores = len(set().union(*usable))
    set_core_sharing(len(usable) > cores)
    return max(1, cores // len(usable))


def _gather_on_host(comm: MPI.Comm, value: Any) -> list[Any]:
    """Gather a value from every rank of this one's host. Collective."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    gathered = gather_values(local, value)
    local.Free()
    return gathered
