"""Where a process group's operations run: whose library, which thread, and what is noted of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives import BACKEND
from kaitian_mpi.collectives.agreement_check import AgreementCheck
from kaitian_mpi.collectives.arguments import check_dense
from kaitian_mpi.collectives.roll_call import RollCall
from kaitian_mpi.collectives.vendor import VendorGroup
from kaitian_mpi.collectives.worker import Calls, Method, Queued, Worker
from kaitian_mpi.devices import KINDS, device_of_kind
from kaitian_mpi.mpi.topology import GroupComms

Tensors = list[torch.Tensor]


class Dispatcher:
    """Carries out the operations of one process group, in the order they are given."""

    def __init__(self, comms: GroupComms, store: dist.Store, name: str, timeout: timedelta) -> None:
        """Prepare; the vendor's library and the thread start when they are first needed."""
        self.roll_call = RollCall(comms.world, store, timeout)
        self._comms = comms
        self._store = store
        self._timeout = timeout
        self._is_single_kind = len(comms.groups) == 1
        self._vendors: dict[str, VendorGroup | None] = {"cpu": None}
        self._worker = Worker(f"{BACKEND}-{name}")
        detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._check = AgreementCheck(comms.world, self.roll_call.arrive) if detailed else None

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed, so that no more can follow."""
        return self._worker.broken is not None

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
    ) -> Work:
        """Carry out an operation.

        Args:
            name: as gloo calls it in profiles, such as `all_reduce`.
            method: what does it through host memory.
            calls: the arguments of each call of `method`.
            result: the dense tensors it writes.
            given: the name and the arguments of the vendor's method that does the same, where all
                ranks are of the kind that `result` is on. The last are torch's options; with
                `asyncOp` false the caller will wait for it anyway.
            details: what ranks may not differ in besides the tensors' types and shapes.

        Raises:
            UnsupportedError: a tensor is not dense.
            CollectiveError: it failed in the caller's thread.
        """
        for tensor in result:
            check_dense(tensor, name)
        if self._is_single_kind and result and not result[0].is_cpu:
            vendor = self.vendor(result[0].device)
            if vendor is not None:
                method, calls = vendor.call, (given,)
        if self._check is not None:
            method, calls = self._check.before(method, calls, name, result, details), ((),)
        in_background = given[-1].asyncOp
        if torch.autograd._profiler_enabled():
            return self._run_profiled(name, method, calls, result, in_background)
        return self._worker.run(name, method, calls, result, in_background)

    def vendor(self, device: torch.device) -> VendorGroup | None:
        """Return the vendor's group for tensors on this device; None where MPI does it."""
        if device.type not in self._vendors:
            self._vendors[device.type] = self._join_vendor(device.type)
        return self._vendors[device.type]

    def close(self) -> None:
        """Finish what is queued, end the thread and the vendor's library. Collective."""
        self._worker.close()
        for vendor in self._vendors.values():
            if vendor is not None:
                vendor.close()

    def _join_vendor(self, kind: str) -> VendorGroup | None:
        backend = device_of_kind(kind).vendor_backend if kind in KINDS else None
        if backend is None:
            return None
        group = self._comms.group
        store = dist.PrefixStore(f"vendor/{self._comms.own.kind}", self._store)
        return VendorGroup(backend, store, group.rank, group.size, self._timeout)

    def _run_profiled(
        self, name: str, method: Method, calls: Calls, result: Tensors, in_background: bool
    ) -> Work:
        record = torch.autograd.profiler.record_function(f"{BACKEND}:{name}")
        with record:
            work = self._worker.run(name, method, calls, result, in_background)
            if isinstance(work, Queued):
                work.end_with(record)
        return work
