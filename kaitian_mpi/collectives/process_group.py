"""The `kaitian` process group: torch.distributed over ranks of unlike device kinds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives import BACKEND, hybrid
from kaitian_mpi.collectives.staging import on_host
from kaitian_mpi.collectives.vendor import VendorGroup
from kaitian_mpi.collectives.worker import Worker
from kaitian_mpi.devices import KINDS, device_of_kind
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi import host_collectives, rendezvous
from kaitian_mpi.mpi.runtime import close_at_exit, closed_early, wait_quietly
from kaitian_mpi.mpi.topology import GroupComms, positions, split_by_kind, subset

if TYPE_CHECKING:
    from mpi4py import MPI

# Below this a collective is over before a waiting rank could fall asleep and wake up again.
_QUIET_BYTES = 32 << 10


class KaitianProcessGroup(dist.ProcessGroup):
    """Collectives over the ranks of `comms.world`.

    Every operation is collective, takes tensors on any device, and runs after those given before
    it. What is not supported raises an error before anything is sent.
    """

    def __init__(self, store: dist.Store, comms: GroupComms, name: str, timeout: timedelta) -> None:
        """Make the group from communicators of its own."""
        super().__init__(comms.world.rank, comms.world.size)  # type: ignore[call-arg]
        self.comms = comms
        self.algorithm = "flat"
        self._store = store
        self._timeout = timeout
        self._host_group = hybrid.HostGroup(comms)
        self._vendor_group: VendorGroup | None = None
        self._worker = Worker(f"kaitian-{name}")
        self._closed = False
        close_at_exit(self.shutdown)

    @property
    def single_kind(self) -> bool:
        """Whether all ranks are of one device kind: then there is no relay."""
        return len(self.comms.groups) == 1

    def getBackendName(self) -> str:  # noqa: N802
        """Return `kaitian`."""
        return BACKEND

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Reduce each tensor over all ranks, in place."""
        options = dist.AllreduceOptions() if opts is None else opts
        op = options.reduceOp
        for tensor in tensors:
            host_collectives.reduction(_wide(tensor.dtype), _plain(op))
        return self._submit(lambda: self._allreduce_all(tensors, op), tensors, options)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce several tensors over all ranks, in place."""
        return self.allreduce(tensors, opts)

    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Copy each tensor from rank `opts.rootRank` to every rank."""
        options = dist.BroadcastOptions() if opts is None else opts
        root = options.rootRank

        def task() -> None:
            for tensor in tensors:
                self._broadcast(tensor, root)

        return self._submit(task, tensors, options)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Gather each rank's `inputs[i]` into `outputs[i]`, a list by rank of equal shapes."""
        for gathered, tensor in zip(outputs, inputs, strict=True):
            if any(t.numel() != tensor.numel() or t.dtype != tensor.dtype for t in gathered):
                raise UnsupportedError("all_gather needs tensors of one size and type on all ranks")

        def task() -> None:
            for gathered, tensor in zip(outputs, inputs, strict=True):
                self._all_gather(gathered, tensor)

        flat = [tensor for gathered in outputs for tensor in gathered]
        return self._submit(task, flat, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Gather each rank's tensor into one, along the first dimension."""
        parts = list(output.view(-1).chunk(self.size()))
        return self.allgather([parts], [tensor.reshape(-1)], opts)

    # Its name before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Work:
        """Wait for every rank."""
        return self._submit(lambda: wait_quietly(self.comms.world), [], opts)

    def shutdown(self) -> None:
        """Finish what is queued, end the thread, free the communicators. Collective."""
        if self._closed:
            return
        self._closed = True
        closed_early(self.shutdown)
        self._worker.close()
        if self._vendor_group is not None:
            self._vendor_group.close()
        wait_quietly(self.comms.world)
        self.comms.free()

    def _submit(self, task: Callable[[], None], result: list[torch.Tensor], opts: Any) -> Work:
        in_background = getattr(opts, "asyncOp", True)
        return self._worker.run(task, result, in_background=in_background)

    def _allreduce_all(self, tensors: list[torch.Tensor], op: dist.ReduceOp) -> None:
        for tensor in tensors:
            wide = tensor.to(_wide(tensor.dtype)).contiguous()
            self._allreduce(wide.view(-1), _plain(op))
            if op == dist.ReduceOp.AVG:
                wide.div_(self.size())
            if wide is not tensor:
                tensor.copy_(wide)

    def _allreduce(self, flat: torch.Tensor, op: dist.ReduceOp) -> None:
        vendor = self._vendor(flat.device)
        if self.single_kind and vendor is not None:
            vendor.allreduce(flat, op)
            return
        if flat.numel() * flat.element_size() > _QUIET_BYTES:
            wait_quietly(self.comms.world)
        algorithm = "flat" if self.single_kind else self.algorithm
        # Without a vendor's library a group works in host memory, on its ranks' copies.
        if vendor is None and algorithm != "flat":
            with on_host(flat) as host:
                hybrid.allreduce(algorithm, self.comms, self._host_group, host, op)
            return
        hybrid.allreduce(algorithm, self.comms, vendor or self._host_group, flat, op)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        vendor = self._vendor(tensor.device) if self.single_kind else None
        if vendor is not None:
            vendor.broadcast(tensor, root)
            return
        wait_quietly(self.comms.world)
        is_root = self.rank() == root
        with on_host(tensor, read=is_root, write=not is_root) as host:
            host_collectives.broadcast(self.comms.world, host, root)

    def _all_gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor) -> None:
        vendor = self._vendor(tensor.device) if self.single_kind else None
        if vendor is not None:
            vendor.all_gather(gathered, tensor)
            return
        wait_quietly(self.comms.world)
        with on_host(tensor, write=False) as host:
            flat = host.new_empty(self.size() * host.numel())
            host_collectives.all_gather(self.comms.world, flat, host)
            for part, target in zip(flat.chunk(self.size()), gathered, strict=True):
                target.copy_(part.view(target.shape))

    def _vendor(self, device: torch.device) -> VendorGroup | None:
        """Return the vendor's group for tensors on this device; None where MPI does it."""
        backend = device_of_kind(device.type).vendor_backend if device.type in KINDS else None
        if backend is None:
            return None
        if self._vendor_group is None:
            group = self.comms.group
            store = dist.PrefixStore(f"vendor/{self.comms.own.kind}", self._store)
            self._vendor_group = VendorGroup(backend, store, group.rank, group.size, self._timeout)
        return self._vendor_group


def _plain(op: Any) -> Any:
    return dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type a reduction computes in: 16-bit floats are summed in float32 and rounded once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def create(options: Any, _: Any = None) -> KaitianProcessGroup:
    """Make the process group that torch asks for. Collective over the group's ranks."""
    world = rendezvous.world_or_join()
    if options.group_size > world.size:
        raise UnsupportedError(
            f"a group of {options.group_size} ranks in an MPI world of {world.size}; start the "
            "job with mpirun, one process per rank"
        )
    comm = _communicator(world.comm, options)
    kinds = [world.kinds[rank] for rank in positions(comm, world.comm)]
    comms = split_by_kind(comm, kinds)
    return KaitianProcessGroup(options.store, comms, str(options.group_id), options.timeout)


def _communicator(world: MPI.Intracomm, options: Any) -> MPI.Intracomm:
    members = list(options.global_ranks_in_group)
    if not members:  # the default group; its ranks may be in another order than MPI's
        return cast("MPI.Intracomm", world.Split(0, options.group_rank))
    default = dist.group.WORLD
    base = default.comms.world if isinstance(default, KaitianProcessGroup) else world
    return subset(base, members, str(options.group_id))
