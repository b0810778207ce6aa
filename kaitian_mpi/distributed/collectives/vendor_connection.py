"""The connection of ranks by their vendor's library: when it is made, watched and ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed.collectives.arrivals import LibraryWatch
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_job, write_labeled
from kaitian_mpi.runtime.polling import wait_until

if TYPE_CHECKING:
    from kaitian_mpi.devices import Device
    from kaitian_mpi.mpi.store import MPIStore
    from kaitian_mpi.mpi.topology import GroupComms

_log = logging.getLogger(__name__)
_LIBRARY_MARGIN = timedelta(seconds=30)  # its own error at its timeout names no rank


class VendorConnection:
    """The library's process group of this rank's group, which is made when it is first needed.

    A thread watches for ranks that the library would wait for in vain. A rank that is alone in its
    group has no process group, and so no threads and no store of the library's.
    """

    def __init__(
        self,
        comms: GroupComms,
        kind: Device,
        store: dist.Store,
        group_store: MPIStore,
        timeout: timedelta,
        on_failure: Callable[[CollectiveError], None],
    ) -> None:
        """Store what making it needs: `store` is for the library's bootstrap.

        `on_failure` is called, maybe from another thread, when a rank is lost; before anything that
        waits in the library goes on.
        """
        self.size = comms.group.size
        self._comms = comms
        self._kind = kind
        self._store = store
        self._group_store = group_store
        self._timeout = timeout
        self._on_failure = on_failure
        self._failure: CollectiveError | None = None
        self._watch: LibraryWatch | None = None
        self._lock = threading.Lock()
        self._is_made = self._is_aborted = False
        self._backend: Any = None

    def make(self) -> None:
        """Connect the ranks, unless they are connected. Collective over the group the first time.

        Raises:
            CollectiveError: it was aborted before.
        """
        if self._is_made:
            return
        group = self._comms.own
        # The group of the same ranks by kind alone, or by host too, has another prefix.
        prefix = f"vendor/{group.kind}" + ("" if group.node is None else f"/host {group.node}")
        world = self._comms.world
        if ulfm.is_enabled():
            faults = self._kind.leave_losses_to_caller()
            if faults and world.rank == 0:
                _log.warning("%s", "; ".join(faults))
        view = self._group_store.view(prefix)
        self._watch = LibraryWatch(world, group.ranks, view, self._timeout, self._fail)
        backend = None
        if self.size > 1:
            rank = self._comms.group.rank
            store = dist.PrefixStore(prefix, self._store)
            limit = self._timeout + _LIBRARY_MARGIN
            backend = self._kind.create_vendor_group(store, rank, self.size, limit)
        with self._lock:
            self._backend = backend
            self._is_made = True
        if self._failure is not None:
            self._abort()
            raise self._failure

    @contextmanager
    def calling(self, name: str) -> Iterator[Any]:
        """Return a context in which a collective is called, with the library's process group.

        An error of the library's is raised as a lost rank if this is the cause.
        """
        if self._is_aborted:
            raise RankLostError("a rank is lost")
        assert self._watch is not None
        self._watch.called(name)
        try:
            yield self._backend
        except Exception as error:
            if not self._is_aborted:
                raise
            raise RankLostError(f"a rank is lost ({error})") from None

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._watch is not None:
            self._watch.set_timeout(timeout)
        if hasattr(self._backend, "_set_default_timeout"):
            self._backend._set_default_timeout(timeout + _LIBRARY_MARGIN)

    def abort(self, failure: CollectiveError) -> None:
        """End what waits in the library, and make later calls fail. May be called by any thread."""
        with self._lock:
            self._failure = self._failure or failure
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            backend = None if self._is_aborted else self._backend
            self._is_aborted = self._is_made
        if backend is not None:
            self._kind.abort_vendor_group(backend)

    def _fail(self, failure: CollectiveError) -> None:
        """End what waits in the library. Called by the watch, in its thread."""
        if not isinstance(failure, RankLostError):
            # A caller that waits for the device would compute with what is not there.
            write_labeled(str(failure))
            abort_job(1)
        self._on_failure(failure)
        self.abort(failure)

    def wait_for(self, work: Work) -> None:
        """Wait for a work up to the timeout, or until the library is aborted."""
        limit_sec = (self._timeout + _LIBRARY_MARGIN).total_seconds()
        wait_until(lambda: self._is_aborted or work.is_completed(), limit_sec)

    def close(self) -> None:
        """End the library's process group, which has finished its works. Not collective.

        A library's own `shutdown` waits without a limit, and NCCL's from 2.31.2 on for the other
        ranks of the host as well (pytorch#194775), so that ranks which destroy their groups in
        different orders would wait forever.
        """
        self._abort()
        # The library's threads end, which use the store, by MPI: before MPI does.
        self._backend = None
        if self._watch is not None:  # to the end: the group may still wait for others
            self._watch.close()
