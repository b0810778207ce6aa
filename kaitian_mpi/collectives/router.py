"""Where a process group's operations run: whose library, which thread, and what is noted of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives.arrivals import RollCall
from kaitian_mpi.collectives.detail_check import AgreementCheck
from kaitian_mpi.collectives.staging import SideStreams
from kaitian_mpi.collectives.torch_tools import count_for_debugging
from kaitian_mpi.collectives.validation import check_dense
from kaitian_mpi.collectives.vendor import VendorGroup
from kaitian_mpi.collectives.worker import Calls, Finished, Method, Queued, Worker
from kaitian_mpi.devices import Device
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.datatypes import reduction
from kaitian_mpi.mpi.store import MPIStore
from kaitian_mpi.mpi.topology import GroupComms

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class OwnDevice:
    """This rank's device."""

    device: torch.device
    kind: Device
    """What there is to know about it."""
    has_vendor: bool
    """Whether the vendor's library can join the ranks of this rank's group."""


class Dispatcher:
    """Carries out the operations of one process group, in the order they are given.

    Which way an operation takes follows from the group's ranks, the operation and the tensors'
    type alone: other ranks may have their tensors on another device.
    """

    def __init__(
        self,
        comms: GroupComms,
        own: OwnDevice,
        store: dist.Store,
        arrivals: MPIStore,
        name: str,
        timeout: timedelta,
    ) -> None:
        """Prepare; the vendor's library and the thread start when they are first needed."""
        self.roll_call = RollCall(comms.world, arrivals, timeout)
        self._comms = comms
        self._own = own
        self._store = store
        self._timeout = timeout
        self._is_single_kind = len(comms.groups) == 1
        self._vendor: VendorGroup | None = None
        self._streams = SideStreams(own.device if own.has_vendor else None)
        self._worker = Worker(f"kaitian-{name}", self._streams)
        detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._check = AgreementCheck(comms.world, self.roll_call.arrive) if detailed else None

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed, so that no more can follow."""
        return self._worker.broken is not None

    def fail(self, error: CollectiveError) -> None:
        """Let no more collectives follow: a message of the group has failed."""
        if self._worker.broken is None:
            self._worker.broken = error

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the operations that follow another time-out, the same on every rank."""
        self._timeout = timeout
        self.roll_call.set_timeout(timeout)
        if self._vendor is not None:
            self._vendor.set_timeout(timeout)

    def record_losses(self) -> None:
        """Complete the futures of operations that fail with the loss of a rank all the same.

        For a caller that asks `is_broken` before it uses what they deliver.
        """
        self._worker.records_losses = True

    def run(
        self,
        name: str,
        method: Method,
        calls: Calls,
        result: Tensors,
        given: tuple[Any, ...],
        details: Any = None,
        op: Any = None,
    ) -> Work:
        """Carry out an operation.

        Args:
            name: as gloo calls it in profiles, such as `all_reduce`.
            method: what does it through host memory.
            calls: the arguments of each call of `method`; where there is an `op`, of all but the
                last, which is how to reduce the first.
            result: the tensors it writes.
            given: the name and the arguments of the vendor's method that does the same; the name
                is empty where there is none, and the tensors may then be sparse. The last are
                torch's options; with `asyncOp` false the caller will wait for it anyway.
            details: what ranks may not differ in besides the tensors' types and shapes.
            op: how to reduce, as torch has it; None where nothing is reduced.

        Raises:
            UnsupportedError: a tensor is not dense, or cannot be reduced so.
            CollectiveError: it failed in the caller's thread.
        """
        if result and result[0].is_meta:
            return Finished(result)  # there is nothing to carry, as torch's other backends find
        if given[0]:
            for tensor in result:
                check_dense(tensor, name)
        count_for_debugging(given[0] or "allreduce")
        vendor = None
        if self._is_single_kind and result and given[0]:
            vendor = self.vendor_for([tensor.dtype for tensor in result], op)
        if vendor is None and op is not None:
            calls = [(*call, reduction(call[0].dtype, op)) for call in calls]
        if not torch.autograd._profiler_enabled():
            return self._run(name, vendor, method, calls, result, given, details)
        record = torch.autograd.profiler.record_function(f"kaitian:{name}")
        with record:
            work = self._run(name, vendor, method, calls, result, given, details)
            if isinstance(work, Queued):
                work.end_with(record)
        return work

    def run_beside(self, name: str, method: Method, *arguments: Any) -> None:
        """Carry out what need not wait for what is queued, at once and in the caller's thread.

        Raises:
            RankLostError: a rank is lost.
        """
        with torch.autograd.profiler.record_function(f"kaitian:{name}"):
            self._worker.run_beside(name, method, *arguments)

    def vendor_for(self, dtypes: Iterable[torch.dtype], op: Any = None) -> VendorGroup | None:
        """Return what joins the ranks of this rank's kind; None where that is MPI.

        Args:
            dtypes: the types of what is to be reduced, or moved.
            op: how to reduce, as torch has it; None where nothing is reduced.
        """
        if not self._own.has_vendor:
            return None
        named = None if op is None else getattr(op, "op", op).name
        if not all(self._own.kind.vendor_takes(dtype, named) for dtype in dtypes):
            return None
        if self._vendor is None:
            group = self._comms.group
            store = dist.PrefixStore(f"vendor/{self._comms.own.kind}", self._store)
            self._vendor = VendorGroup(
                self._own.kind, self._own.device, store, group.rank, group.size, self._timeout
            )
        return self._vendor

    def close(self) -> None:
        """Finish what is queued, end the thread and the vendor's library. Collective."""
        self._worker.close()
        if self._vendor is not None:
            self._vendor.close()

    def _run(
        self,
        name: str,
        vendor: VendorGroup | None,
        method: Method,
        calls: Calls,
        result: Tensors,
        given: tuple[Any, ...],
        details: Any,
    ) -> Work:
        in_background = given[-1].asyncOp
        if vendor is None:
            if self._check is not None:
                method, calls = self._check.before(method, calls, name, result, details), ((),)
            return self._worker.run(name, method, calls, result, in_background)
        check = _nothing
        if self._check is not None:
            check = self._check.before(_nothing, (), name, result, details)
        # After what is queued, which goes through host memory and may be about the same tensors.
        self._worker.run(name, check, ((),), [], in_background=False).wait()
        # In the caller's thread, for a vendor's libraries must see the operations of all groups in
        # the same order on every rank.
        if vendor.has_in_place(given):
            return vendor.start(*given, written=result).work
        with self._streams.after_caller(given):
            call = vendor.start(*given, written=result)
        return self._worker.run(name, call.finish, ((),), result, in_background)


def _nothing() -> None:
    pass
