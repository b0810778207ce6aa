"""The `kaitian` process group: torch.distributed over ranks of unlike device kinds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
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

from kaitian_mpi.backend import BACKEND, device_types
from kaitian_mpi.backend.monitored_barrier import MonitoredBarrier
from kaitian_mpi.backend.point_to_point import ENDED, Mailbox
from kaitian_mpi.collectives import hybrid
from kaitian_mpi.collectives.host import HostOperations
from kaitian_mpi.collectives.router import Dispatcher, OwnDevice
from kaitian_mpi.collectives.staging import from_host, to_host
from kaitian_mpi.collectives.torch_releases import BackendQueries, with_names_before_2_13
from kaitian_mpi.collectives.torch_tools import not_compiled
from kaitian_mpi.collectives.validation import check_pieces, check_whole, element_counts
from kaitian_mpi.errors import CollectiveError, UnsupportedError
from kaitian_mpi.mpi.datatypes import Reduction
from kaitian_mpi.mpi.messages import ANY_SOURCE
from kaitian_mpi.mpi.retired import retire
from kaitian_mpi.mpi.store import MPIStore
from kaitian_mpi.mpi.topology import GroupComms
from kaitian_mpi.runtime.lifecycle import close_at_exit, closed_early
from kaitian_mpi.runtime.ulfm import is_revoked

Tensors = list[torch.Tensor]


@not_compiled
@with_names_before_2_13
class KaitianProcessGroup(BackendQueries, dist.ProcessGroup):
    """Collectives over the ranks of `comms.world`.

    Every operation but a message is collective, takes tensors on any device, and runs after those
    given before it. What is not supported raises an error before anything is sent.

    Tensors of a group of one device kind go to the vendor's library, others through host memory;
    the allreduce between kinds is the hybrid one.
    """

    def __init__(
        self,
        store: dist.Store,
        arrivals: MPIStore,
        comms: GroupComms,
        own: OwnDevice,
        name: str,
        timeout: timedelta,
    ) -> None:
        """Make the group.

        Args:
            store: torch's for this group.
            arrivals: the group's own part of the job's store, never busy: for who has come.
            comms: communicators of its own.
            own: this rank's device.
            name: torch's.
            timeout: how long one operation may take.
        """
        super().__init__(comms.world.rank, comms.world.size)  # type: ignore[call-arg]
        self.comms = comms
        self.algorithm = "flat"
        self.single_kind = len(comms.groups) == 1
        """Whether all ranks are of one device kind: then there is no relay."""
        self._name = name
        self._size = comms.world.size
        self._timeout = timeout
        self._dispatcher = Dispatcher(comms, own, store, arrivals, name, timeout)
        self._run: Callable[..., Work] = self._dispatcher.run
        self._arrive = self._dispatcher.roll_call.arrive
        self._host = HostOperations(comms.world, self._dispatcher.roll_call)
        self._host_group = hybrid.HostGroup(comms)
        self._mailbox = Mailbox(
            comms.messages,
            f"kaitian-messages-{name}",
            self._dispatcher.roll_call,
            timeout,
            self._dispatcher.fail,
        )
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
        return [torch.device(kind) for kind in device_types()]

    def getBackendName(self) -> str:  # noqa: N802
        """Return `kaitian`."""
        return BACKEND

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor over all ranks, in place."""
        opts = opts or AllreduceOptions()
        op = opts.reduceOp
        calls = [(tensor,) for tensor in tensors]
        given = ("allreduce", tensors, opts)
        if tensors[0].is_sparse and op == dist.ReduceOp.SUM:
            given = ("", tensors, opts)  # no vendor's library does it
            return self._run("all_reduce", self._host.sum_sparse, calls, tensors, given, op.op)
        return self._run("all_reduce", self._allreduce, calls, tensors, given, op.op, op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors over all ranks, in place."""
        options = AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.asyncOp = opts.reduceOp, opts.asyncOp
        return self.allreduce(tensors, options)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor to rank `opts.rootRank`."""
        opts = opts or ReduceOptions()
        op, root = opts.reduceOp, opts.rootRank
        calls = [(tensor, root) for tensor in tensors]
        given = ("reduce", tensors, opts)
        return self._run("reduce", self._host.reduce, calls, tensors, given, (op.op, root), op)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Copy each tensor from rank `opts.rootRank` to every rank."""
        opts = opts or BroadcastOptions()
        root = opts.rootRank
        calls = [(tensor, root) for tensor in tensors]
        given = ("broadcast", tensors, opts)
        return self._run("broadcast", self._host.broadcast, calls, tensors, given, root)

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
        given = ("allgather", outputs, inputs, opts or AllgatherOptions())
        return self._run("all_gather", self._host.all_gather, calls, result, given)

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
        calls = list(zip(outputs, inputs, strict=True))
        given = ("all_gather_single_coalesced", outputs, inputs, opts or AllgatherOptions())
        return self._run("all_gather", self._host.all_gather_single, calls, outputs, given)

    def gather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather each rank's tensor into a list on rank `opts.rootRank`."""
        opts = opts or GatherOptions()
        root = opts.rootRank
        pieces = outputs[0] if self.rank() == root else []
        if pieces:
            check_pieces(pieces, inputs[0], self._size, "gather", equal=True)
        calls = [(pieces, inputs[0], root)]
        given = ("gather", outputs, inputs, opts)
        return self._run("gather", self._host.gather, calls, pieces or inputs, given, root)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather each rank's tensor into one, along the first dimension, on rank `opts.rootRank`.

        torch asks for it from 2.14 on.
        """
        opts = opts or GatherOptions()
        if self.rank() != opts.rootRank:
            return self.gather([], [tensor], opts)
        check_whole(output, tensor, self._size, "gather_single")
        pieces = output.view(self._size, *tensor.shape)
        return self.gather([list(pieces)], [tensor], opts)

    def scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Give each rank its piece of the list on rank `opts.rootRank`."""
        opts = opts or ScatterOptions()
        root = opts.rootRank
        pieces = inputs[0] if self.rank() == root else []
        if pieces:
            check_pieces(pieces, outputs[0], self._size, "scatter", equal=True)
        calls = [(outputs[0], pieces, root)]
        given = ("scatter", outputs, inputs, opts)
        return self._run("scatter", self._host.scatter, calls, outputs, given, root)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Reduce `inputs[i][r]` to rank r's `outputs[i]`; sizes may differ between ranks."""
        opts = opts or ReduceScatterOptions()
        op = opts.reduceOp
        calls = []
        for output, pieces in zip(outputs, inputs, strict=True):
            check_pieces(pieces, output, self._size, "reduce_scatter")
            calls.append((output, pieces))
        given = ("reduce_scatter", outputs, inputs, opts)
        host = self._host.reduce_scatter
        return self._run("reduce_scatter", host, calls, outputs, given, op.op, op)

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
        op = opts.reduceOp
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole(tensor, output, self._size, "reduce_scatter_single")
            calls.append((output, tensor))
        host = self._host.reduce_scatter_single
        given = ("reduce_scatter_single_coalesced", outputs, inputs, opts)
        return self._run("reduce_scatter", host, calls, outputs, given, op.op, op)

    def alltoall(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it."""
        for pieces in (outputs, inputs):
            check_pieces(pieces, inputs[0], self._size, "all_to_all")
        calls = [(outputs, inputs)]
        given = ("alltoall", outputs, inputs, opts or AllToAllOptions())
        return self._run("all_to_all", self._host.all_to_all, calls, outputs, given)

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
        calls = [(output, received, tensor, sent)]
        opts = opts or AllToAllOptions()
        given = ("all_to_all_single", output, tensor, output_splits, input_splits, opts)
        return self._run("all_to_all", self._host.all_to_all_single, calls, [output], given)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for every rank."""
        opts = opts or BarrierOptions()
        return self._run("barrier", self._arrive, [()], [], ("barrier", opts))

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every rank; rank 0 raises an error that names those who do not come in time."""
        if isinstance(timeout, float):  # seconds, as torch takes them too
            timeout = timedelta(seconds=timeout)
        limit = self._timeout if timeout is None else timeout
        # Beside the queue: what hangs there, this is to name.
        barrier = self._monitored_barrier.run
        self._dispatcher.run_beside("monitored_barrier", barrier, limit, wait_all_ranks)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start sending one tensor to a rank. Not collective."""
        return self._mailbox.send(tensors[0], target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start receiving one tensor from a rank. Not collective."""
        return self._mailbox.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:  # type: ignore[override]
        """Start receiving one tensor from whichever rank sends first. Not collective."""
        return self._mailbox.receive(tensors[0], ANY_SOURCE, tag)

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the operations that follow another time-out; call it on every rank, between them.

        Not collective. torch's own `_set_pg_timeout` knows gloo and NCCL only, and warns of others.
        """
        self._timeout = timeout
        self._dispatcher.set_timeout(timeout)
        self._mailbox.set_timeout(timeout)

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed or a rank is lost, so that no more can follow."""
        return self._dispatcher.is_broken or is_revoked(self.comms.world)

    def record_losses(self) -> None:
        """Complete the futures of operations that fail with the loss of a rank all the same.

        For a caller that asks `is_broken` before it uses what they deliver: an exception in a
        future crashes DDP's reducer.
        """
        self._dispatcher.record_losses()

    def shutdown(self) -> None:
        """Finish what is queued, end the threads, and give the communicators back.

        Not collective: no other rank is waited for, but for what is queued, up to its time-out.
        """
        if self._closed:
            return
        self._closed = True
        closed_early(self.shutdown)
        self._run = _refuse
        self._dispatcher.close()
        is_done = self._mailbox.close()
        if is_revoked(self.comms.world):
            return
        self._dispatcher.roll_call.leave()
        # Of a collective that has failed, and of a message nobody received, MPI is not done.
        if is_done and not self.is_broken:
            retire(self.comms)

    def _allreduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        algorithm = "flat" if self.single_kind else self.algorithm
        if algorithm == "flat":
            self._host.allreduce(tensor, op)
            return
        self._arrive()
        # Without a vendor's library a group works in host memory, on its ranks' copies.
        vendor = self._dispatcher.vendor_for([tensor.dtype], op.undivided.kind)
        lent = to_host(tensor) if vendor is None else vendor.lend(tensor.detach())
        group = vendor or self._host_group
        hybrid.allreduce(algorithm, self.comms, group, lent.view(-1), op)
        from_host(lent, tensor)


def _refuse(name: str, *_: Any) -> Work:
    raise CollectiveError(f"{name}: {ENDED}")
