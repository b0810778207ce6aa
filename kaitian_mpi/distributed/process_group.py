"""The `kaitian` process group: torch.distributed over ranks of different device kinds."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed import BACKEND, device_types
from kaitian_mpi.distributed.collective_calls import CollectiveCalls
from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker
from kaitian_mpi.distributed.collectives.collective import Collective, Tensors
from kaitian_mpi.distributed.collectives.host import HostOperations
from kaitian_mpi.distributed.collectives.router import Router, check_own_device
from kaitian_mpi.distributed.collectives.staging import SideStreams
from kaitian_mpi.distributed.collectives.torch_releases import BackendQueries, not_compiled
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.host_collectives import ANY_SOURCE
from kaitian_mpi.mpi.topology import (
    GroupComms,
    RankInfo,
    are_joined_by_library,
    free_when_unused,
    shared_devices,
)
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.timeline.recorder import GroupLabel
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.system import CommunicationThread
from kaitian_mpi.runtime.ulfm import is_revoked

# Modules that not every job needs are imported in functions.
if TYPE_CHECKING:
    from kaitian_mpi.distributed.collectives.vendor import VendorLibrary
    from kaitian_mpi.distributed.network.link import Link
    from kaitian_mpi.distributed.point_to_point import Mailbox
    from kaitian_mpi.distributed.relay.relay import Relay
    from kaitian_mpi.mpi.store import MPIStore

_UNIQUE_LENGTH = 8  # in timelines
_ENDED = "this process group has been destroyed"


@not_compiled
class KaitianProcessGroup(BackendQueries, CollectiveCalls):
    """Collectives over the ranks of `comms.world`.

    Every operation except `send` and `recv` is collective and runs after those called before it;
    tensors may be on any device. Unsupported calls raise an error before anything is sent.

    Where all ranks are of one device kind, operations use the vendor's library, if there is one;
    otherwise they go through host memory. The allreduce between kinds is the hybrid one.
    """

    def __init__(
        self,
        options: Any,
        unique: str,
        comms: GroupComms,
        links: Mapping[int, Link],
        world: World,
        infos: Sequence[RankInfo],
    ) -> None:
        """Create the group on this rank; `comms` and `links` are for this group alone.

        `options` are torch's; no group of any job has the same `unique` name, which is the same on
        every rank. `infos` are of the group's ranks.
        """
        super().__init__(comms.world.rank, comms.world.size)  # type: ignore[call-arg]
        self.comms = comms
        self.links = links
        self.has_one_group = len(comms.groups) == 1
        """Whether all ranks are in one group, so that nothing crosses between kinds."""
        self.torch_versions = tuple(info.torch_version for info in infos)
        """The release of torch of each rank."""
        self._name = str(options.group_id)
        self._timeout = options.timeout
        self._closed = False
        store = world.store.view(f"group {unique}", options.timeout)
        self._arrivals = ArrivalTracker(comms.world, store, options.timeout)
        has_library = _has_library(world, [infos[rank] for rank in comms.own.ranks])
        streams = SideStreams(world.device if has_library else None)
        select_device = partial(world.device_kind.select, world.device_index)
        make_thread = partial(CommunicationThread, select_device=select_device)
        self._worker = Worker(f"kaitian-{self._name}", streams, self._arrivals.begins, make_thread)
        self._libraries: list[VendorLibrary] = []
        if has_library:
            # A script may create a group of the same name again, with the same store.
            unique_store = dist.PrefixStore(unique, options.store)
            self._libraries = self._make_libraries(world, unique_store, store)
        has_accelerators = not all(info.is_on_host for info in infos)
        self.relay = self._make_relay(world, has_accelerators)
        """Between device and host memory; None if all ranks are CPUs of one group."""
        self.host = self._host_operations(infos)
        """Carries collectives out in host memory; its `algorithm` of `allreduce` can be set."""
        label = GroupLabel(self._name, unique[:_UNIQUE_LENGTH])
        library = self._libraries[0] if has_library and self.has_one_group else None
        self._check_devices = partial(check_own_device, str(world.info), world.device)
        router = Router(library, self.host, self._worker, streams, label, self._check_devices)
        self._mailbox: Mailbox | None = None
        self._make_mailbox = partial(
            _make_mailbox,
            comms.messages,
            f"kaitian-messages-{self._name}",
            self._arrivals,
            on_failure=self._worker.fail,
            make_thread=make_thread,
            has_accelerators=has_accelerators,
        )
        self._lock = threading.Lock()
        # It usually returns the function that it is given.
        self._paced = world.device_kind.calls.around
        self._run = self._paced(router.run)
        register_close(self.shutdown)

    def _make_libraries(
        self, world: World, unique_store: dist.Store, group_store: MPIStore
    ) -> list[VendorLibrary]:
        """Return the vendor's library for each way to group the ranks, not connected yet."""
        from kaitian_mpi.distributed.collectives.vendor import VendorLibrary
        from kaitian_mpi.distributed.collectives.vendor_connection import VendorConnection

        kind = world.device_kind
        connections = [
            VendorConnection(
                groups, kind, unique_store, group_store, self._timeout, self._worker.fail
            )
            for groups in (self.comms, self.comms.by_host)
            if groups is not None
        ]
        return [VendorLibrary(connection, kind, world.device) for connection in connections]

    def _make_relay(self, world: World, has_accelerators: bool) -> Relay | None:
        if self.has_one_group and not has_accelerators:
            return None
        from kaitian_mpi.distributed.relay.relay import Relay

        return Relay(world.communication, world.device, self.links, has_accelerators)

    def _host_operations(self, infos: Sequence[RankInfo]) -> HostOperations:
        """Return the collectives in host memory; with several groups, their allreduce is hybrid."""
        ranks = self.comms.world, self._arrivals, self.links
        if self.relay is None:
            return HostOperations(*ranks)
        if self.has_one_group:
            from kaitian_mpi.distributed.collectives.relayed import RelayedOperations

            return RelayedOperations(*ranks, self.relay)
        from kaitian_mpi.distributed.collectives.hybrid import HybridOperations

        groups = [[infos[rank] for rank in group.ranks] for group in self.comms.groups]
        joins_ranks = any(len(group) > 1 and are_joined_by_library(group) for group in groups)
        return HybridOperations(
            self.comms, self._libraries, self._arrivals, self.links, self.relay, joins_ranks
        )

    @property
    def pg_name(self) -> str:
        return self._name

    group_name = pg_name  # type: ignore[assignment]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types()]

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def measure_links(self) -> bool:
        """Measure how to reduce between hosts; False if nothing is, in host memory. Collective.

        Otherwise the first long tensor is preceded by that.
        """
        link = self.links.get(self.comms.world.py2f())
        if link is None or self.uses_library:
            return False
        link.choose()
        return True

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start sending one tensor to a rank. Not collective."""
        self._check_devices(tensors)
        return self._paced(self._messages("send").send)(tensors[0], target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start receiving one tensor from a rank. Not collective."""
        self._check_devices(tensors)
        return self._paced(self._messages("recv").receive)(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:  # type: ignore[override]
        return self.recv(tensors, ANY_SOURCE, tag)

    def _messages(self, name: str) -> Mailbox:
        with self._lock:
            if self._closed:
                raise CollectiveError(f"{name}: {_ENDED}")
            self._worker.check(name)
            if self._mailbox is None:
                self._mailbox = self._make_mailbox(timeout=self._timeout)
            return self._mailbox

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the following operations; call it on every rank, between operations.

        Not collective. torch's own `_set_pg_timeout` supports gloo and NCCL only, and warns for
        others.
        """
        self._timeout = timeout
        self._arrivals.set_timeout(timeout)
        for library in self._libraries:
            library.set_timeout(timeout)
        if self._mailbox is not None:
            self._mailbox.set_timeout(timeout)

    @property
    def uses_library(self) -> bool:
        """Whether a vendor's library connects all ranks, and so carries out most collectives."""
        return self.has_one_group and bool(self._libraries)

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed or a rank is lost, so that the group cannot be used."""
        return self._worker.broken is not None or is_revoked(self.comms.world)

    def record_losses(self) -> None:
        """Complete futures without an error even if the operation failed because a rank was lost.

        For a caller that checks `is_broken` before it uses their values: an exception in a future
        crashes DDP's reducer.
        """
        self._worker.record_losses()

    def shutdown(self) -> None:
        """Finish what is queued, end the threads, and release the communicators.

        Not collective: waits for other ranks only in queued operations, up to their timeout.
        """
        with self._lock:  # a message that is sent at this moment has its mailbox, or fails
            if self._closed:
                return
            self._closed = True
        unregister_close(self.shutdown)
        self._run = _raise_ended
        if self.is_broken:  # also by what no library knows; its threads may wait in one
            for library in self._libraries:
                library.abort(CollectiveError(_ENDED))
        self._worker.close()
        for library in self._libraries:
            library.close()
        is_done = self._mailbox is None or self._mailbox.close()
        if is_revoked(self.comms.world):
            return
        self._arrivals.close()
        # MPI is not done with a failed collective, nor with a message that was not received.
        if is_done and not self.is_broken:
            free_when_unused(self.comms)


def _make_mailbox(*arguments: Any, **settings: Any) -> Mailbox:
    from kaitian_mpi.distributed.point_to_point import Mailbox

    return Mailbox(*arguments, **settings)


def _raise_ended(collective: Collective) -> Work:
    raise CollectiveError(f"{collective.name}: {_ENDED}")


def _has_library(world: World, group: Sequence[RankInfo]) -> bool:
    alike = len({torch.device(info.device).type for info in group}) == 1
    # It fails if two ranks share a device.
    joined = all(info.library for info in group) and world.device_kind.vendor_backend is not None
    return alike and joined and not shared_devices(group)
