"""Who carries out a collective: a vendor's library, MPI in host memory, or both together."""

from __future__ import annotations

from functools import partial

from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives.collective import Collective, LibraryCollective, Tensors
from kaitian_mpi.collectives.detail_check import AgreementCheck
from kaitian_mpi.collectives.host import HostOperations
from kaitian_mpi.collectives.hybrid import HybridOperations
from kaitian_mpi.collectives.observation import is_observed, observed
from kaitian_mpi.collectives.staging import SideStreams
from kaitian_mpi.collectives.vendor import VendorGroup, VendorLibrary
from kaitian_mpi.collectives.work import Finished
from kaitian_mpi.collectives.worker import Worker


class Router:
    """Starts each collective of a process group where it belongs.

    The route follows from the group's ranks, the operation and the tensors' type alone: other ranks
    may have their tensors on another device.
    """

    def __init__(
        self,
        library: VendorLibrary,
        host: HostOperations,
        hybrid: HybridOperations,
        worker: Worker,
        streams: SideStreams,
        check: AgreementCheck | None,
    ) -> None:
        """Prepare.

        Args:
            library: joins the ranks of this rank's kind, where MPI does not.
            host: joins all ranks in host memory.
            hybrid: joins ranks of several kinds.
            worker: runs collectives in order.
            streams: where a library works on copies of the caller's tensors.
            check: compares the ranks' calls; None unless torch's debug level is DETAIL.
        """
        is_single_kind = len(hybrid.comms.groups) == 1
        self._library = library if is_single_kind and library.is_present else None
        self._host = host if is_single_kind else hybrid
        self._rank, self._size = host.rank, host.size
        self._worker = worker
        self._streams = streams
        self._check = check

    def run(self, collective: Collective) -> Work:
        """Start a collective, after those given before it.

        Raises:
            UnsupportedError: its arguments do not fit together, or cannot be reduced so.
            CollectiveError: it failed in the caller's thread.
        """
        collective.check(self._rank, self._size)
        result = collective.result
        if result and result[0].is_meta:
            return Finished(result)  # there is nothing to carry, as torch's other backends find
        if is_observed():
            start = partial(self._start, collective, result)
            return observed(collective.name, collective.operator, start)
        return self._start(collective, result)

    def _start(self, collective: Collective, result: Tensors) -> Work:
        if self._library is not None and isinstance(collective, LibraryCollective):
            dtypes = [tensor.dtype for tensor in result]
            group = self._library.group_for(dtypes, collective.op)
            if group is not None:
                return self._start_on_library(collective, result, group)
        call = collective.on_host(self._host)
        if self._check is not None:
            call = self._check.before(call, collective)
        is_async = collective.options.asyncOp
        return self._worker.run(collective.name, call, result, is_async, collective)

    def _start_on_library(
        self, collective: LibraryCollective, result: Tensors, group: VendorGroup
    ) -> Work:
        name = collective.name
        # After what is queued, which goes through host memory and may be about the same tensors.
        if self._check is None:
            self._worker.drain(name)
        else:
            compare = partial(self._check.compare, collective)
            self._worker.run(name, compare, [], in_background=False).wait()
        # In the caller's thread, for a vendor's libraries must see the operations of all groups in
        # the same order on every rank.
        if group.has_in_place(collective):
            return group.start(collective).work
        with self._streams.after_caller(collective):
            call = group.start(collective)
        return self._worker.run(name, call.finish, result, collective.options.asyncOp)
