"""torch's collectives: how each is executed in host memory, and by a vendor's library."""

# The signatures are those by which torch calls, not those of its stubs.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed.collectives import torch_releases
from kaitian_mpi.distributed.collectives.collective import (
    Collective,
    Tensors,
    call_for_each,
    check_pieces,
    check_whole,
    element_counts,
)
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi.datatypes import reduction

if TYPE_CHECKING:
    from kaitian_mpi.distributed.residual import Residual


@not_compiled
class CollectiveCalls(dist.ProcessGroup):
    """The methods by which torch starts a collective, with torch's signatures. All are collective.

    Without options, torch's defaults apply. Unsupported arguments raise an `UnsupportedError`.
    """

    _run: Callable[[Collective], Work]
    """Carries a collective out, or queues it."""

    def _start(self, *call: Any) -> Work:
        """Carry out the collective with these fields of a `Collective`."""
        return self._run(Collective(*call))

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.AllreduceOptions()
        op = opts.reduceOp
        if tensors[0].is_sparse and op == dist.ReduceOp.SUM:
            return self._sum_sparse(tensors, opts)
        return self._start(
            "all_reduce",
            tensors,
            [],
            opts,
            lambda host: call_for_each(host.allreduce, _reductions(zip(tensors), op)),
            _all_reduce_on_library(opts),
            op,
        )

    def sum_on_host(self, tensor: torch.Tensor) -> Work:
        """Start to sum a host tensor over all ranks, in place and in host memory.

        A library would take it to the device, which has work to finish before.
        """
        opts = c10d.AllreduceOptions()
        opts.asyncOp = True
        op = reduction(tensor.dtype, opts.reduceOp)
        return self._start(
            "all_reduce",
            [tensor],
            [],
            opts,
            lambda host: partial(host.allreduce_flat, tensor, op),
        )

    def sum_gradients(
        self, buffer: torch.Tensor, residual: Residual | None, in_background: bool
    ) -> Work:
        """Sum a buffer of gradients over all ranks, in place; see `gradients.sum_gradients`."""
        opts = c10d.AllreduceOptions()
        opts.asyncOp = in_background
        if buffer.is_sparse:
            return self._sum_sparse([buffer], opts)
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        op = opts.reduceOp

        def on_host(host: Any) -> Any:
            reduction(real.dtype, op)  # raises an error for an unsupported dtype
            return partial(host.sum_gradients, real, residual)

        on_library = _all_reduce_on_library(opts)
        return self._start("all_reduce", [real], [], opts, on_host, on_library, op)

    def _sum_sparse(self, tensors: Tensors, opts: c10d.AllreduceOptions) -> Work:
        """Sum each `torch.sparse_coo` tensor over all ranks, in place. No library supports it."""
        from kaitian_mpi.distributed.collectives.sparse import sum_sparse

        return self._run(
            Collective(
                name="all_reduce",
                outputs=tensors,
                inputs=[],
                options=opts,
                on_host=lambda host: call_for_each(
                    sum_sparse, [(host, tensor) for tensor in tensors]
                ),
                takes_sparse=True,
            )
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        options = c10d.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
            options.asyncOp = opts.asyncOp
        return self.allreduce(tensors, options)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.ReduceOptions()
        op = opts.reduceOp
        root = opts.rootRank
        return self._start(
            "reduce",
            tensors,
            [],
            opts,
            lambda host: call_for_each(
                host.reduce, _reductions([(tensor, root) for tensor in tensors], op)
            ),
            lambda library, outputs, _: [library.reduce(outputs, opts)],
            op,
        )

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.BroadcastOptions()
        root = opts.rootRank
        return self._start(
            "broadcast",
            tensors,
            [],
            opts,
            lambda host: call_for_each(host.broadcast, [(tensor, root) for tensor in tensors]),
            lambda library, outputs, _: [library.broadcast(outputs, opts)],
        )

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather each rank's `inputs[i]` into `outputs[i]`, a list by rank; sizes may differ."""
        opts = opts or c10d.AllgatherOptions()
        pairs = [*zip(outputs, inputs, strict=True)]
        for pieces, tensor in pairs:
            check_pieces(pieces, tensor, self.size(), "all_gather")
            rank_piece = pieces[self.rank()]
            if rank_piece.numel() != tensor.numel():
                raise UnsupportedError(
                    f"all_gather: this rank's own piece has {rank_piece.numel()} elements, its "
                    f"input {tensor.numel()}; they must be equal"
                )
        return self._start(
            "all_gather",
            outputs,
            inputs,
            opts,
            lambda host: call_for_each(host.all_gather, pairs),
            lambda library, outputs, inputs: [library.allgather(outputs, inputs, opts)],
        )

    def gather_together(self, outputs: list[Tensors], inputs: Tensors, in_background: bool) -> Work:
        """Gather each rank's `inputs[i]` into `outputs[i]`, a list by rank, in host memory.

        The tensors are contiguous, and sizes may differ; see `gradients.gather_together`.
        """
        opts = c10d.AllgatherOptions()
        opts.asyncOp = in_background
        return self._start(
            "all_gather",
            outputs,
            inputs,
            opts,
            lambda host: partial(host.all_gather_together, outputs, inputs),
        )

    def allgather_coalesced(
        self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        by_tensor = [list(pieces) for pieces in zip(*output_lists, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather each rank's `inputs[i]` into `outputs[i]`, along its first dimension."""
        opts = opts or c10d.AllgatherOptions()
        pairs = [*zip(outputs, inputs, strict=True)]
        for output, tensor in pairs:
            check_whole(output, tensor, self.size(), "all_gather_single")
        return self._start(
            "all_gather",
            outputs,
            inputs,
            opts,
            lambda host: call_for_each(host.all_gather_single, pairs),
            partial(torch_releases.all_gather_single, opts),
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.GatherOptions()
        root = opts.rootRank
        pieces = outputs[0] if self.rank() == root else []
        if pieces:
            check_pieces(pieces, inputs[0], self.size(), "gather", equal=True)
        return self._start(
            "gather",
            pieces,
            inputs,
            opts,
            lambda host: partial(host.gather, pieces, inputs[0], root),
            lambda library, pieces, inputs: [
                library.gather([pieces] if pieces else [], inputs, opts)
            ],
        )

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather each rank's tensor into one, along the first dimension, on rank `opts.rootRank`.

        Called by torch from 2.14 on.
        """
        opts = opts or c10d.GatherOptions()
        if self.rank() != opts.rootRank:
            return self.gather([], [tensor], opts)
        check_whole(output, tensor, self.size(), "gather_single")
        pieces = output.view(self.size(), *tensor.shape)
        return self.gather([list(pieces)], [tensor], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        opts = opts or c10d.ScatterOptions()
        root = opts.rootRank
        pieces = inputs[0] if self.rank() == root else []
        if pieces:
            check_pieces(pieces, outputs[0], self.size(), "scatter", equal=True)
        return self._start(
            "scatter",
            outputs,
            pieces,
            opts,
            lambda host: partial(host.scatter, outputs[0], pieces, root),
            lambda library, outputs, pieces: [
                library.scatter(outputs, [pieces] if pieces else [], opts)
            ],
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        """Reduce `inputs[i][r]` to rank r's `outputs[i]`; sizes may differ between ranks."""
        opts = opts or c10d.ReduceScatterOptions()
        op = opts.reduceOp
        pairs = [*zip(outputs, inputs, strict=True)]
        for output, pieces in pairs:
            check_pieces(pieces, output, self.size(), "reduce_scatter")
        return self._start(
            "reduce_scatter",
            outputs,
            inputs,
            opts,
            lambda host: call_for_each(host.reduce_scatter, _reductions(pairs, op)),
            lambda library, outputs, inputs: [library.reduce_scatter(outputs, inputs, opts)],
            op,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce each of `inputs`; each rank gets its part of the first dimension in `outputs`."""
        opts = opts or c10d.ReduceScatterOptions()
        op = opts.reduceOp
        pairs = [*zip(outputs, inputs, strict=True)]
        for output, tensor in pairs:
            check_whole(tensor, output, self.size(), "reduce_scatter_single")
        return self._start(
            "reduce_scatter",
            outputs,
            inputs,
            opts,
            lambda host: call_for_each(host.reduce_scatter_single, _reductions(pairs, op)),
            partial(torch_releases.reduce_scatter_single, opts),
            op,
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.AllToAllOptions()
        for pieces in (outputs, inputs):
            check_pieces(pieces, inputs[0], self.size(), "all_to_all")
        return self._start(
            "all_to_all",
            outputs,
            inputs,
            opts,
            lambda host: partial(host.all_to_all, outputs, inputs),
            lambda library, outputs, inputs: [library.alltoall(outputs, inputs, opts)],
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        """Send a part of the first dimension of `tensor` to each rank, into its `output`."""
        opts = opts or c10d.AllToAllOptions()
        received = element_counts(output, output_splits, self.size())
        sent = element_counts(tensor, input_splits, self.size())
        return self._start(
            "all_to_all",
            [output],
            [tensor],
            opts,
            lambda host: partial(host.all_to_all_single, output, received, tensor, sent),
            partial(torch_releases.all_to_all_single, (output_splits, input_splits), opts),
        )

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or c10d.BarrierOptions()
        return self._start("barrier", [], [], opts, lambda host: host.barrier)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks of the group; the error at the group's timeout names those missing.

        Lightning calls it for the group that it makes around `prepare_data`.
        """
        self.barrier().wait(timeout or timedelta())  # 0: only the group's

    # The names that torch before 2.13 calls.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _reductions(calls: Iterable[tuple[Any, ...]], op: Any) -> list[tuple[Any, ...]]:
    """Return each call's arguments, the first of which is a tensor, and then its reduction."""
    return [(*arguments, reduction(arguments[0].dtype, op)) for arguments in calls]


def _all_reduce_on_library(opts: c10d.AllreduceOptions) -> Callable[[Any, Any, Any], list[Work]]:
    # One call per tensor: libraries take no more.
    return lambda library, outputs, _: [library.allreduce([output], opts) for output in outputs]
