"""The `kaitian` process group: torch.distributed over ranks of unlike device kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from kaitian_mpi.collectives import BACKEND, DEVICE_TYPES, hybrid
from kaitian_mpi.collectives.arguments import check_dense, check_pieces, check_whole, element_counts
from kaitian_mpi.collectives.operations import (
    HostOperations,
    collect,
    mpi_reduction,
    plain,
    reducible,
)
from kaitian_mpi.collectives.point_to_point import Mailbox
from kaitian_mpi.collectives.staging import on_host
from kaitian_mpi.collectives.vendor import VendorGroup
from kaitian_mpi.collectives.worker import Worker
from kaitian_mpi.devices import KINDS, device_of_kind
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi.messages import ANY_SOURCE
from kaitian_mpi.mpi.runtime import close_at_exit, closed_early, wait_quietly
from kaitian_mpi.mpi.topology import GroupComms

# Below this a collective is over before a waiting rank could fall asleep and wake up again.
_QUIET_BYTES = 32 << 10


Tensors = list[torch.Tensor]


class KaitianProcessGroup(dist.ProcessGroup):
    """Collectives over the ranks of `comms.world`.

    Every operation but a message is collective, takes tensors on any device, and runs after those
    given before it. What is not supported raises an error before anything is sent.

    Tensors of a group of one device kind go to the vendor's library, others through host memory;
    the allreduce between kinds is the hybrid one.
    """

    def __init__(self, store: dist.Store, comms: GroupComms, name: str, timeout: timedelta) -> None:
        """Make the group from communicators of its own."""
        super().__init__(comms.world.rank, comms.world.size)  # type: ignore[call-arg]
        self.comms = comms
        self.algorithm = "flat"
        self._store = store
        self._timeout = timeout
        self._host = HostOperations(comms.world)
        self._host_group = hybrid.HostGroup(comms)
        self._vendor_group: VendorGroup | None = None
        self._worker = Worker(f"kaitian-{name}")
        self._mailbox = Mailbox(comms.messages, f"kaitian-messages-{name}")
        self._closed = False
        close_at_exit(self.shutdown)

    @property
    def single_kind(self) -> bool:
        """Whether all ranks are of one device kind: then there is no relay."""
        return len(self.comms.groups) == 1

    @property
    def pg_name(self) -> str:
        """The name torch gave this group."""
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name  # type: ignore[assignment]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in DEVICE_TYPES]

    def getBackendName(self) -> str:  # noqa: N802
        """Return `kaitian`."""
        return BACKEND

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor over all ranks, in place."""
        opts = opts or AllreduceOptions()
        op = opts.reduceOp
        for tensor in tensors:
            mpi_reduction(tensor.dtype, op)

        if op == dist.ReduceOp.SUM and any(tensor.is_sparse for tensor in tensors):
            return self._sum_sparse(tensors, opts)

        def task() -> None:
            for tensor in tensors:
                with reducible(tensor, op, self.size()) as lent:
                    self._allreduce(lent.view(-1), plain(op))

        return self._submit(task, "allreduce", (tensors, opts), tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors over all ranks, in place."""
        options = AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.asyncOp = opts.reduceOp, opts.asyncOp
        return self.allreduce(tensors, options)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor to rank `opts.rootRank`."""
        opts = opts or ReduceOptions()
        for tensor in tensors:
            mpi_reduction(tensor.dtype, opts.reduceOp)
        calls = [(tensor, opts.rootRank, opts.reduceOp) for tensor in tensors]
        return self._each(self._host.reduce, calls, "reduce", (tensors, opts), tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Copy each tensor from rank `opts.rootRank` to every rank."""
        opts = opts or BroadcastOptions()
        calls = [(tensor, opts.rootRank) for tensor in tensors]
        return self._each(self._host.broadcast, calls, "broadcast", (tensors, opts), tensors, opts)

    def allgather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather each rank's `inputs[i]` into `outputs[i]`, a list by rank; sizes may differ."""
        for pieces, tensor in zip(outputs, inputs, strict=True):
            check_pieces(pieces, tensor, self.size(), "all_gather")
            if pieces[self.rank()].numel() != tensor.numel():
                raise UnsupportedError("all_gather: a rank's own piece differs from what it gives")
        calls = list(zip(outputs, inputs, strict=True))
        result = [piece for pieces in outputs for piece in pieces]
        given = (outputs, inputs, opts or AllgatherOptions())
        return self._each(self._host.all_gather, calls, "allgather", given, result, opts)

    def allgather_coalesced(
        self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather several tensors: `output_lists[r][i]` is rank r's `inputs[i]`."""
        by_tensor = [list(pieces) for pieces in zip(*output_lists, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single(  # type: ignore[override]
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Gather each rank's tensor into one, along the first dimension."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather several tensors, each into one along its first dimension."""
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole(output, tensor, self.size(), "all_gather_single")
        calls = list(zip(outputs, inputs, strict=True))
        name, host = "all_gather_single_coalesced", self._host.all_gather_single
        given = (outputs, inputs, opts or AllgatherOptions())
        return self._each(host, calls, name, given, outputs, opts)

    def gather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather each rank's tensor into a list on rank `opts.rootRank`."""
        opts = opts or GatherOptions()
        pieces = outputs[0] if self.rank() == opts.rootRank else []
        if pieces:
            check_pieces(pieces, inputs[0], self.size(), "gather", equal=True)
        calls = [(pieces, inputs[0], opts.rootRank)]
        return self._each(
            self._host.gather, calls, "gather", (outputs, inputs, opts), pieces or inputs, opts
        )

    def scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Give each rank its piece of the list on rank `opts.rootRank`."""
        opts = opts or ScatterOptions()
        pieces = inputs[0] if self.rank() == opts.rootRank else []
        if pieces:
            check_pieces(pieces, outputs[0], self.size(), "scatter", equal=True)
        calls = [(outputs[0], pieces, opts.rootRank)]
        return self._each(
            self._host.scatter, calls, "scatter", (outputs, inputs, opts), outputs, opts
        )

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Reduce `inputs[i][r]` to rank r's `outputs[i]`; sizes may differ between ranks."""
        opts = opts or ReduceScatterOptions()
        for output, pieces in zip(outputs, inputs, strict=True):
            mpi_reduction(output.dtype, opts.reduceOp)
            check_pieces(pieces, output, self.size(), "reduce_scatter")

        def task() -> None:
            for output, pieces in zip(outputs, inputs, strict=True):
                counts = [piece.numel() for piece in pieces]
                self._host.reduce_scatter(output, collect(pieces), counts, opts.reduceOp)

        return self._submit(task, "reduce_scatter", (outputs, inputs, opts), outputs, opts)

    def reduce_scatter_single(  # type: ignore[override]
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Reduce a tensor over all ranks and leave each its part of the first dimension."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce several tensors over all ranks and leave each rank its parts."""
        opts = opts or ReduceScatterOptions()
        for output, tensor in zip(outputs, inputs, strict=True):
            mpi_reduction(tensor.dtype, opts.reduceOp)
            check_whole(tensor, output, self.size(), "reduce_scatter_single")
        calls = [
            (output, tensor, [output.numel()] * self.size(), opts.reduceOp)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        name, host = "reduce_scatter_single_coalesced", self._host.reduce_scatter
        return self._each(host, calls, name, (outputs, inputs, opts), outputs, opts)

    def alltoall(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it."""
        for pieces in (outputs, inputs):
            check_pieces(pieces, inputs[0], self.size(), "all_to_all")
        given = (outputs, inputs, opts or AllToAllOptions())
        return self._each(
            self._host.all_to_all, [(outputs, inputs)], "alltoall", given, outputs, opts
        )

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        """Send a part of the first dimension to each rank; no splits mean equal parts."""
        counts = [
            element_counts(output, output_splits, self.size()),
            element_counts(tensor, input_splits, self.size()),
        ]
        calls = [(output, counts[0], tensor, counts[1])]
        given = (output, tensor, output_splits, input_splits, opts or AllToAllOptions())
        host = self._host.all_to_all_single
        return self._each(host, calls, "all_to_all_single", given, [output], opts)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for every rank."""
        return self._worker.run(
            lambda: wait_quietly(self.comms.world), [], in_background=_in_background(opts)
        )

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start sending one tensor to a rank. Not collective."""
        return self._mailbox.send(tensors[0], target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start receiving one tensor from a rank. Not collective."""
        return self._mailbox.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:  # type: ignore[override]
        """Start receiving one tensor from whichever rank sends first. Not collective."""
        return self._mailbox.receive(tensors[0], ANY_SOURCE, tag)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Finish what is queued, end the threads, free the communicators. Collective."""
        if self._closed:
            return
        self._closed = True
        closed_early(self.shutdown)
        self._worker.close()
        if self._vendor_group is not None:
            self._vendor_group.close()
        wait_quietly(self.comms.world)
        self._mailbox.close()
        self.comms.free()

    def _sum_sparse(self, tensors: Tensors, opts: Any) -> Work:
        def task() -> None:
            for tensor in tensors:
                self._host.sum_sparse(tensor)

        return self._worker.run(task, tensors, in_background=_in_background(opts))

    def _each(
        self,
        host: Callable[..., None],
        calls: Sequence[tuple[Any, ...]],
        name: str,
        given: tuple[Any, ...],
        result: Tensors,
        opts: Any,
    ) -> Work:
        """Submit an operation that is `host` once for each of `calls`."""

        def task() -> None:
            for arguments in calls:
                host(*arguments)

        return self._submit(task, name, given, result, opts)

    def _submit(
        self,
        task: Callable[[], None],
        name: str,
        given: tuple[Any, ...],
        result: Tensors,
        opts: Any,
    ) -> Work:
        """Queue an operation: the vendor's `name(*given)` where it can do it, else `task`."""
        check_dense(result, name)
        vendor = self._vendor(result[0].device) if self.single_kind and result else None
        if vendor is not None:
            chosen = vendor
            task = lambda: chosen.call(name, *given)  # noqa: E731
        return self._worker.run(task, list(result), in_background=_in_background(opts))

    def _allreduce(self, flat: torch.Tensor, op: Any) -> None:
        if flat.numel() * flat.element_size() > _QUIET_BYTES:
            wait_quietly(self.comms.world)
        vendor = self._vendor(flat.device)
        algorithm = "flat" if self.single_kind else self.algorithm
        # Without a vendor's library a group works in host memory, on its ranks' copies.
        if vendor is None and algorithm != "flat":
            with on_host(flat) as host:
                hybrid.allreduce(algorithm, self.comms, self._host_group, host, op)
            return
        hybrid.allreduce(algorithm, self.comms, vendor or self._host_group, flat, op)

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


def _in_background(opts: Any) -> bool:
    return getattr(opts, "asyncOp", True)
