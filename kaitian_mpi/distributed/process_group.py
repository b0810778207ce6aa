"""The `kaitian` process group: torch.distributed over ranks of different device kinds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed import BACKEND, device_types
from kaitian_mpi.distributed.collective_calls import CollectiveCalls
from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker
from kaitian_mpi.distributed.collectives.collective import Collective, Tensors
from kaitian_mpi.distributed.collectives.host import HostOperations
from kaitian_mpi.distributed.collectives.hybrid import HybridOperations
from kaitian_mpi.distributed.collectives.router import Router, profile_record
from kaitian_mpi.distributed.collectives.staging import SideStreams
from kaitian_mpi.distributed.collectives.torch_releases import BackendQueries, not_compiled
from kaitian_mpi.distributed.collectives.vendor import OwnDevice, VendorLibrary
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.distributed.point_to_point import ENDED, Mailbox
from kaitian_mpi.distributed.relay.relay import Relay
from kaitian_mpi.distributed.store_barrier import MonitoredBarrier
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.nonblocking import ANY_SOURCE
from kaitian_mpi.mpi.store import MPIStore
from kaitian_mpi.mpi.topology import GroupComms, OwnDeviceCheck, free_when_unused
from kaitian_mpi.observe.timeline.recorder import GroupLabel
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.ulfm import is_revoked

_UNIQUE_LENGTH = 8  # in timelines


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
        store: dist.Store,
        group_store: MPIStore,
        comms: GroupComms,
        own: OwnDevice,
        name: str,
        timeout: timedelta,
        relay: Relay,
        torch_versions: Sequence[str],
        *,
        check_devices: OwnDeviceCheck,
        unique_name: str = "",
    ) -> None:
        """Create the group on this rank; `comms` and `relay` are for this group alone.

        `group_store` is its own view of the job's store; no group of any job has the same
        `unique_name`, which is the same on every rank.
        """
        rank, size = comms.world.rank, comms.world.size
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.comms, self.relay = comms, relay
        self.has_one_group = len(comms.groups) == 1
        """Whether all ranks are in one group, so that there is no relay."""
        self.torch_versions = tuple(torch_versions)
        """The release of torch of each rank."""
        self._name, self._timeout, self._closed = name, timeout, False
        self._arrivals = ArrivalTracker(comms.world, group_store, timeout)
        streams = SideStreams(own.device if own.has_vendor else None)
        self._worker = Worker(f"kaitian-{name}", streams)
        groupings = [comms] if comms.by_host is None else [comms, comms.by_host]
        self._libraries = [
            VendorLibrary(own, groups, store, group_store, timeout, self._worker.fail)
            for groups in groupings
        ]
        host = HostOperations(comms.world, self._arrivals, relay)
        self._hybrid = HybridOperations(comms, self._arrivals, self._libraries, relay)
        label = GroupLabel(name, unique_name[:_UNIQUE_LENGTH])
        carriers = self._libraries[0], host, self._hybrid, self._worker, streams
        router = Router(*carriers, label, check_devices)
        self._check_devices = check_devices
        self._mailbox = Mailbox(
            comms.messages, f"kaitian-messages-{name}", self._arrivals, timeout, self._worker.fail
        )
        # Usually these are the methods themselves.
        pace = own.kind.calls
        self._run = pace.around(router.run)
        self._send = pace.around(self._mailbox.send)
        self._receive = pace.around(self._mailbox.receive)
        self._monitored = pace.around(MonitoredBarrier(group_store, rank, size).run)
        register_close(self.shutdown)

    @property
    def pg_name(self) -> str:
        """The name torch gave this group."""
        return self._name

    group_name = pg_name  # type: ignore[assignment]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types()]

    def getBackendName(self) -> str:  # noqa: N802
        """Return `kaitian`."""
        return BACKEND

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms that there are for `allreduce` between kinds, on the group's ranks."""
        return self._hybrid.algorithms

    @property
    def algorithm(self) -> str:
        """The algorithm of `allreduce` between kinds, one of `algorithms`; settable.

        Must be the same on every rank; has no effect where all ranks are in one group.
        """
        return self._hybrid.algorithm

    @algorithm.setter
    def algorithm(self, name: str) -> None:
        self._hybrid.algorithm = name

    def measure_links(self) -> bool:
        """Measure how to reduce between hosts; False if nothing is, in host memory. Collective.

        Otherwise the first long tensor is preceded by that.
        """
        link = self.relay.network.link(self.comms.world)
        if link is None or (self.has_one_group and self._libraries[0].is_present):
            return False
        link.choose()
        return True

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every rank; rank 0 raises an error that names those that are missing."""
        if isinstance(timeout, float):  # seconds, which torch accepts as well
            timeout = timedelta(seconds=timeout)
        limit = self._timeout if timeout is None else timeout
        with profile_record("monitored_barrier"):
            self._monitored(limit, wait_all_ranks)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start sending one tensor to a rank. Not collective."""
        self._check_devices(tensors)
        return self._send(tensors[0], target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start receiving one tensor from a rank. Not collective."""
        self._check_devices(tensors)
        return self._receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:  # type: ignore[override]
        return self.recv(tensors, ANY_SOURCE, tag)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the following operations; call it on every rank, between operations.

        Not collective. torch's own `_set_pg_timeout` supports gloo and NCCL only, and warns for
        others.
        """
        self._timeout = timeout
        self._arrivals.set_timeout(timeout)
        for library in self._libraries:
            library.set_timeout(timeout)
        self._mailbox.set_timeout(timeout)

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed or a rank is lost, so that the group cannot be used."""
        return self._worker.broken is not None or is_revoked(self.comms.world)

    def record_losses(self) -> None:
        """Complete futures without an error even if the operation failed because a rank was lost.

        For a caller that checks `is_broken` before it uses their values: an exception in a future
        crashes DDP's reducer.
        """
        self._worker.records_losses = True

    def shutdown(self) -> None:
        """Finish what is queued, end the threads, and release the communicators.

        Not collective: waits for other ranks only in queued operations, up to their timeout.
        """
        if self._closed:
            return
        self._closed = True
        unregister_close(self.shutdown)
        self._run = _raise_ended
        if self.is_broken:  # also by what no library knows; its threads may wait in one
            for library in self._libraries:
                library.abort(CollectiveError(ENDED))
        self._worker.close()
        for library in self._libraries:
            library.close()
        is_done = self._mailbox.close()
        if is_revoked(self.comms.world):
            return
        self._arrivals.close()
        # MPI is not done with a failed collective, nor with a message that was not received.
        if is_done and not self.is_broken:
            free_when_unused(self.comms)


def _raise_ended(collective: Collective) -> Work:
    raise CollectiveError(f"{collective.name}: {ENDED}")
