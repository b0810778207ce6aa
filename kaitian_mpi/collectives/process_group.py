"""The `kaitian` process group: torch.distributed over ranks of unlike device kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from kaitian_mpi.collectives import BACKEND, DEVICE_TYPES, hybrid
from kaitian_mpi.collectives.arguments import check_dense, check_pieces, check_whole, element_counts
from kaitian_mpi.collectives.dispatch import Dispatcher
from kaitian_mpi.collectives.monitored_barrier import MonitoredBarrier
from kaitian_mpi.collectives.operations import HostOperations
from kaitian_mpi.collectives.point_to_point import Mailbox
from kaitian_mpi.collectives.staging import from_host, to_host
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi.datatypes import check_reduction, kind_of
from kaitian_mpi.mpi.direct import average
from kaitian_mpi.mpi.messages import ANY_SOURCE
from kaitian_mpi.mpi.runtime import close_at_exit, closed_early, wait_quietly
from kaitian_mpi.mpi.topology import GroupComms

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
        self.single_kind = len(comms.groups) == 1
        """Whether all ranks are of one device kind: then there is no relay."""
        self._name = name
        self._size = comms.world.size
        self._timeout = timeout
        self._dispatcher = Dispatcher(comms, store, name, timeout)
        self._arrive = self._dispatcher.roll_call.arrive
        self._host = HostOperations(comms.world, self._arrive)
        self._host_group = hybrid.HostGroup(comms)
        self._mailbox = Mailbox(comms.messages, f"kaitian-messages-{name}")
        self._monitored_barrier = MonitoredBarrier(comms.world)
        self._closed = False
        close_at_exit(self.shutdown)

    @property
    def pg_name(self) -> str:
        """The name torch gave this group."""
        return self._name

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
            check_reduction(tensor.dtype, op)
        kind = kind_of(op)
        if kind == dist.ReduceOp.SUM and any(tensor.is_sparse for tensor in tensors):
            task = partial(_each, self._host.sum_sparse, [(tensor,) for tensor in tensors])
            return self._dispatcher.run("all_reduce", task, tensors, opts)
        check_dense(tensors, "all_reduce")
        task = partial(_each, self._allreduce, [(tensor, kind) for tensor in tensors])
        vendor_call = ("allreduce", tensors, opts)
        return self._dispatcher.run("all_reduce", task, tensors, opts, vendor_call, str(kind))

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
            check_reduction(tensor.dtype, opts.reduceOp)
        kind, root = kind_of(opts.reduceOp), opts.rootRank
        task = partial(_each, self._host.reduce, [(tensor, root, kind) for tensor in tensors])
        details = f"{kind}, root {root}"
        return self._run("reduce", task, tensors, ("reduce", tensors, opts), details)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Copy each tensor from rank `opts.rootRank` to every rank."""
        opts = opts or BroadcastOptions()
        task = partial(_each, self._host.broadcast, [(tensor, opts.rootRank) for tensor in tensors])
        given = ("broadcast", tensors, opts)
        return self._run("broadcast", task, tensors, given, f"root {opts.rootRank}")

    def allgather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather each rank's `inputs[i]` into `outputs[i]`, a list by rank; sizes may differ."""
        for pieces, tensor in zip(outputs, inputs, strict=True):
            check_pieces(pieces, tensor, self._size, "all_gather")
            if pieces[self.rank()].numel() != tensor.numel():
                raise UnsupportedError("all_gather: a rank's own piece differs from what it gives")
        calls = list(zip(outputs, inputs, strict=True))
        result = [piece for pieces in outputs for piece in pieces]
        task = partial(_each, self._host.all_gather, calls)
        given = ("allgather", outputs, inputs, opts or AllgatherOptions())
        return self._run("all_gather", task, result, given)

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
            check_whole(output, tensor, self._size, "all_gather_single")
        task = partial(_each, self._host.all_gather_single, list(zip(outputs, inputs, strict=True)))
        given = ("all_gather_single_coalesced", outputs, inputs, opts or AllgatherOptions())
        return self._run("all_gather", task, outputs, given)

    def gather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather each rank's tensor into a list on rank `opts.rootRank`."""
        opts = opts or GatherOptions()
        root = opts.rootRank
        pieces = outputs[0] if self.rank() == root else []
        if pieces:
            check_pieces(pieces, inputs[0], self._size, "gather", equal=True)
        task = partial(self._host.gather, pieces, inputs[0], root)
        given = ("gather", outputs, inputs, opts)
        return self._run("gather", task, pieces or inputs, given, f"root {root}")

    def scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Give each rank its piece of the list on rank `opts.rootRank`."""
        opts = opts or ScatterOptions()
        root = opts.rootRank
        pieces = inputs[0] if self.rank() == root else []
        if pieces:
            check_pieces(pieces, outputs[0], self._size, "scatter", equal=True)
        task = partial(self._host.scatter, outputs[0], pieces, root)
        given = ("scatter", outputs, inputs, opts)
        return self._run("scatter", task, outputs, given, f"root {root}")

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Reduce `inputs[i][r]` to rank r's `outputs[i]`; sizes may differ between ranks."""
        opts = opts or ReduceScatterOptions()
        kind = kind_of(opts.reduceOp)
        for output, pieces in zip(outputs, inputs, strict=True):
            check_reduction(output.dtype, opts.reduceOp)
            check_pieces(pieces, output, self._size, "reduce_scatter")
        calls = [(output, pieces, kind) for output, pieces in zip(outputs, inputs, strict=True)]
        task = partial(_each, self._host.reduce_scatter, calls)
        given = ("reduce_scatter", outputs, inputs, opts)
        return self._run("reduce_scatter", task, outputs, given, str(kind))

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
        kind = kind_of(opts.reduceOp)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_reduction(tensor.dtype, opts.reduceOp)
            check_whole(tensor, output, self._size, "reduce_scatter_single")
        calls = [(output, tensor, kind) for output, tensor in zip(outputs, inputs, strict=True)]
        task = partial(_each, self._host.reduce_scatter_single, calls)
        given = ("reduce_scatter_single_coalesced", outputs, inputs, opts)
        return self._run("reduce_scatter", task, outputs, given, str(kind))

    def alltoall(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it."""
        for pieces in (outputs, inputs):
            check_pieces(pieces, inputs[0], self._size, "all_to_all")
        task = partial(self._host.all_to_all, outputs, inputs)
        given = ("alltoall", outputs, inputs, opts or AllToAllOptions())
        return self._run("all_to_all", task, outputs, given)

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        """Send a part of the first dimension to each rank; no splits mean equal parts."""
        received = element_counts(output, output_splits, self._size)
        sent = element_counts(tensor, input_splits, self._size)
        task = partial(self._host.all_to_all_single, output, received, tensor, sent)
        opts = opts or AllToAllOptions()
        given = ("all_to_all_single", output, tensor, output_splits, input_splits, opts)
        return self._run("all_to_all", task, [output], given)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for every rank."""
        return self._dispatcher.run("barrier", self._arrive, [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every rank; rank 0 raises an error that names those who do not come in time."""
        limit = timeout or self._timeout
        task = partial(self._monitored_barrier.run, limit, wait_all_ranks=wait_all_ranks)
        options = BarrierOptions()
        options.asyncOp = False
        self._dispatcher.run("monitored_barrier", task, [], options).wait()

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
        self._dispatcher.close()
        if self._dispatcher.is_broken:  # the ranks do not agree on where they are
            self._mailbox.close()
            return
        wait_quietly(self.comms.world)
        self._mailbox.close()
        self.comms.free()

    def _run(
        self,
        name: str,
        task: Callable[[], None],
        result: Tensors,
        vendor_call: tuple[Any, ...],
        details: str = "",
    ) -> Work:
        """Carry out a dense operation; torch's options are the last of the vendor's arguments."""
        check_dense(result, name)
        return self._dispatcher.run(name, task, result, vendor_call[-1], vendor_call, details)

    def _allreduce(self, tensor: torch.Tensor, op: Any) -> None:
        algorithm = "flat" if self.single_kind else self.algorithm
        vendor = None if tensor.is_cpu else self._dispatcher.vendor(tensor.device)
        # Without a vendor's library a group works in host memory, on its ranks' copies.
        if vendor is None and algorithm == "flat":
            self._host.allreduce(tensor, op)
            return
        self._arrive()
        lent = tensor.contiguous() if vendor is not None else to_host(tensor)
        average_after = op == dist.ReduceOp.AVG
        hybrid.allreduce(
            algorithm,
            self.comms,
            vendor or self._host_group,
            lent.view(-1),
            dist.ReduceOp.SUM if average_after else op,
        )
        if average_after:
            average(lent, self._size)
        from_host(lent, tensor)


def _each(method: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    for arguments in calls:
        method(*arguments)
