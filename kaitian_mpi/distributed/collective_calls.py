"""torch's calls of a process group's collectives, each as a typed operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

from kaitian_mpi.distributed.collectives.collective import Collective, Tensors, check_whole
from kaitian_mpi.distributed.collectives.operations import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    HostSum,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    SparseSum,
    SumGradients,
)
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled, with_names_before_2_13

if TYPE_CHECKING:
    from kaitian_mpi.distributed.network.residual import Residual


@not_compiled
@with_names_before_2_13
class CollectiveCalls(dist.ProcessGroup):
    """The methods by which torch starts a collective, with torch's signatures. All are collective.

    Without options, torch's defaults apply. The operations are described in `operations`.
    """

    _run: Callable[[Collective], Work]
    """Carries a collective out, or queues it."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or AllreduceOptions()
        op = opts.reduceOp
        if tensors[0].is_sparse and op == dist.ReduceOp.SUM:
            return self._run(SparseSum(tensors, [], opts))
        return self._run(AllReduce(tensors, [], opts, op))

    def sum_on_host(self, tensor: torch.Tensor) -> Work:
        """Start to sum a host tensor over all ranks, in place and in host memory."""
        options = AllreduceOptions()
        options.asyncOp = True
        return self._run(HostSum([tensor], [], options, options.reduceOp))

    def sum_gradients(
        self, buffer: torch.Tensor, residual: Residual | None, in_background: bool
    ) -> Work:
        """Sum a buffer of gradients over all ranks, in place; see `sums.sum_gradients`."""
        options = AllreduceOptions()
        options.asyncOp = in_background
        if buffer.is_sparse:
            return self._run(SparseSum([buffer], [], options))
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        return self._run(SumGradients([real], [], options, options.reduceOp, residual=residual))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        options = AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.asyncOp = opts.reduceOp, opts.asyncOp
        return self.allreduce(tensors, options)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or ReduceOptions()
        return self._run(Reduce(tensors, [], opts, opts.reduceOp, opts.rootRank))

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or BroadcastOptions()
        return self._run(Broadcast(tensors, [], opts, None, opts.rootRank))

    def allgather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        return self._run(AllGather(outputs, inputs, opts or AllgatherOptions()))

    def allgather_coalesced(
        self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        by_tensor = [list(pieces) for pieces in zip(*output_lists, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single(  # type: ignore[override]
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        return self._run(AllGatherSingle(outputs, inputs, opts or AllgatherOptions()))

    def gather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        opts = opts or GatherOptions()
        pieces = outputs[0] if self.rank() == opts.rootRank else []
        return self._run(Gather(pieces, inputs, opts, root=opts.rootRank))

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather each rank's tensor into one, along the first dimension, on rank `opts.rootRank`.

        Called by torch from 2.14 on.
        """
        opts = opts or GatherOptions()
        if self.rank() != opts.rootRank:
            return self.gather([], [tensor], opts)
        check_whole(output, tensor, self.size(), "gather_single")
        pieces = output.view(self.size(), *tensor.shape)
        return self.gather([list(pieces)], [tensor], opts)

    def scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        opts = opts or ScatterOptions()
        pieces = inputs[0] if self.rank() == opts.rootRank else []
        return self._run(Scatter(outputs, pieces, opts, root=opts.rootRank))

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        return self._run(ReduceScatter(outputs, inputs, opts, opts.reduceOp))

    def reduce_scatter_single(  # type: ignore[override]
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        return self._run(ReduceScatterSingle(outputs, inputs, opts, opts.reduceOp))

    def alltoall(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        return self._run(AllToAll(outputs, inputs, opts or AllToAllOptions()))

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        splits = output_splits, input_splits
        return self._run(AllToAllSingle([output], [tensor], opts, splits=splits))

    def barrier(self, opts: Any = None) -> Work:
        return self._run(Barrier([], [], opts or BarrierOptions()))
