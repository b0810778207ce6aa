"""torch's collectives: how each is executed in host memory, and by a vendor's library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kaitian_mpi.distributed.collectives import torch_releases
from kaitian_mpi.distributed.collectives.collective import (
    Call,
    Collective,
    LibraryCollective,
    Tensors,
    call_for_each,
    check_pieces,
    check_whole,
)
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi.datatypes import reduction

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from kaitian_mpi.distributed.collectives.host import HostOperations


class AllReduce(LibraryCollective):
    """Reduce each tensor over all ranks, in place."""

    __slots__ = ()
    name, operator = "all_reduce", "allreduce_"

    def on_host(self, host: HostOperations) -> Call:
        op = self.op
        return call_for_each(host.allreduce, [(t, reduction(t.dtype, op)) for t in self.outputs])

    def on_library(self, library: Any) -> list[Work]:
        # One call per tensor: libraries take no more.
        return [library.allreduce([tensor], self.options) for tensor in self.outputs]


class SumGradients(AllReduce):
    """Sum a buffer of gradients over all ranks, in place; on slow links they may lose digits."""

    __slots__ = ()

    def on_host(self, host: HostOperations) -> Call:
        [buffer] = self.outputs
        reduction(buffer.dtype, self.op)  # raises an error for an unsupported dtype
        return partial(host.sum_gradients, buffer, self.residual)


class HostSum(Collective):
    """Sum each host tensor over all ranks, in place, without a library, to which it would travel.

    The device would then have to finish the work before it.
    """

    __slots__ = ()
    name, operator = AllReduce.name, AllReduce.operator

    def on_host(self, host: HostOperations) -> Call:
        calls = [(tensor, reduction(tensor.dtype, self.op)) for tensor in self.outputs]
        return call_for_each(host.allreduce_flat, calls)


class SparseSum(Collective):
    """Sum each `torch.sparse_coo` tensor over all ranks, in place. No library supports it."""

    __slots__ = ()
    name, operator = AllReduce.name, AllReduce.operator
    takes_sparse = True

    def on_host(self, host: HostOperations) -> Call:
        return call_for_each(host.sum_sparse, [(tensor,) for tensor in self.outputs])


class Reduce(LibraryCollective):
    """Reduce each tensor to rank `root`, in place."""

    __slots__ = ()
    name, operator = "reduce", "reduce_"

    def on_host(self, host: HostOperations) -> Call:
        op, root = self.op, self.root
        return call_for_each(host.reduce, [(t, root, reduction(t.dtype, op)) for t in self.outputs])

    def on_library(self, library: Any) -> list[Work]:
        return [library.reduce(self.outputs, self.options)]


class Broadcast(LibraryCollective):
    """Copy each tensor from rank `root` to every rank, in place."""

    __slots__ = ()
    name, operator = "broadcast", "broadcast_"

    def on_host(self, host: HostOperations) -> Call:
        return call_for_each(host.broadcast, [(tensor, self.root) for tensor in self.outputs])

    def on_library(self, library: Any) -> list[Work]:
        return [library.broadcast(self.outputs, self.options)]


class AllGather(LibraryCollective):
    """Gather each rank's `inputs[i]` into `outputs[i]`, a list by rank; sizes may differ."""

    __slots__ = ()
    name, operator = "all_gather", "allgather_"
    may_be_uneven = True

    @property
    def result(self) -> Tensors:
        return [piece for pieces in self.outputs for piece in pieces]

    def check(self, rank: int, size: int) -> None:
        for pieces, tensor in zip(self.outputs, self.inputs, strict=True):
            check_pieces(pieces, tensor, size, self.name)
            if pieces[rank].numel() != tensor.numel():
                raise UnsupportedError(
                    f"{self.name}: this rank's own piece has {pieces[rank].numel()} elements, "
                    f"its input {tensor.numel()}; they must be equal"
                )

    def on_host(self, host: HostOperations) -> Call:
        return call_for_each(host.all_gather, [*zip(self.outputs, self.inputs, strict=True)])

    def on_library(self, library: Any) -> list[Work]:
        return [library.allgather(self.outputs, self.inputs, self.options)]


class AllGatherSingle(LibraryCollective):
    """Gather each rank's `inputs[i]` into `outputs[i]`, along its first dimension."""

    __slots__ = ()
    name, operator = "all_gather", "allgather_into_tensor_coalesced_"
    may_be_uneven = True

    def check(self, rank: int, size: int) -> None:
        for output, tensor in zip(self.outputs, self.inputs, strict=True):
            check_whole(output, tensor, size, "all_gather_single")

    def on_host(self, host: HostOperations) -> Call:
        return call_for_each(host.all_gather_single, [*zip(self.outputs, self.inputs, strict=True)])

    def on_library(self, library: Any) -> list[Work]:
        return torch_releases.all_gather_single(library, self.outputs, self.inputs, self.options)


class Gather(LibraryCollective):
    """Gather the ranks' `inputs[0]` into `outputs`, a list by rank, on rank `root`."""

    __slots__ = ()
    name, operator = "gather", "gather_"

    def check(self, rank: int, size: int) -> None:
        if self.outputs:
            check_pieces(self.outputs, self.inputs[0], size, self.name, equal=True)

    def on_host(self, host: HostOperations) -> Call:
        return partial(host.gather, self.outputs, self.inputs[0], self.root)

    def on_library(self, library: Any) -> list[Work]:
        outputs = [self.outputs] if self.outputs else []
        return [library.gather(outputs, self.inputs, self.options)]


class Scatter(LibraryCollective):
    """Scatter `inputs`, a list by rank on rank `root`, into each rank's `outputs[0]`."""

    __slots__ = ()
    name, operator = "scatter", "scatter_"

    def check(self, rank: int, size: int) -> None:
        if self.inputs:
            check_pieces(self.inputs, self.outputs[0], size, self.name, equal=True)

    def on_host(self, host: HostOperations) -> Call:
        return partial(host.scatter, self.outputs[0], self.inputs, self.root)

    def on_library(self, library: Any) -> list[Work]:
        inputs = [self.inputs] if self.inputs else []
        return [library.scatter(self.outputs, inputs, self.options)]


class ReduceScatter(LibraryCollective):
    """Reduce `inputs[i][r]` to rank r's `outputs[i]`; sizes may differ between ranks."""

    __slots__ = ()
    name, operator = "reduce_scatter", "reduce_scatter_"
    may_be_uneven = True

    def check(self, rank: int, size: int) -> None:
        for output, pieces in zip(self.outputs, self.inputs, strict=True):
            check_pieces(pieces, output, size, self.name)

    def on_host(self, host: HostOperations) -> Call:
        pairs = zip(self.outputs, self.inputs, strict=True)
        calls = [(output, pieces, reduction(output.dtype, self.op)) for output, pieces in pairs]
        return call_for_each(host.reduce_scatter, calls)

    def on_library(self, library: Any) -> list[Work]:
        return [library.reduce_scatter(self.outputs, self.inputs, self.options)]


class ReduceScatterSingle(LibraryCollective):
    """Reduce each of `inputs`; each rank gets its part of the first dimension in `outputs`."""

    __slots__ = ()
    name, operator = "reduce_scatter", "reduce_scatter_tensor_coalesced_"
    may_be_uneven = True

    def check(self, rank: int, size: int) -> None:
        for output, tensor in zip(self.outputs, self.inputs, strict=True):
            check_whole(tensor, output, size, "reduce_scatter_single")

    def on_host(self, host: HostOperations) -> Call:
        pairs = zip(self.outputs, self.inputs, strict=True)
        calls = [(output, tensor, reduction(output.dtype, self.op)) for output, tensor in pairs]
        return call_for_each(host.reduce_scatter_single, calls)

    def on_library(self, library: Any) -> list[Work]:
        outputs, inputs = self.outputs, self.inputs
        return torch_releases.reduce_scatter_single(library, outputs, inputs, self.options)


class AllToAll(LibraryCollective):
    """Send `inputs[r]` to rank r and receive `outputs[r]` from it."""

    __slots__ = ()
    name, operator = "all_to_all", "alltoall_"
    may_be_uneven = True

    def check(self, rank: int, size: int) -> None:
        for pieces in (self.outputs, self.inputs):
            check_pieces(pieces, self.inputs[0], size, self.name)

    def on_host(self, host: HostOperations) -> Call:
        return partial(host.all_to_all, self.outputs, self.inputs)

    def on_library(self, library: Any) -> list[Work]:
        return [library.alltoall(self.outputs, self.inputs, self.options)]


class AllToAllSingle(LibraryCollective):
    """Send a part of the first dimension of `inputs[0]` to each rank, into its `outputs[0]`."""

    __slots__ = ()
    name, operator = AllToAll.name, "alltoall_base_"
    may_be_uneven = True

    def check(self, rank: int, size: int) -> None:
        received, sent = self.splits
        _check_splits(self.outputs[0], received, size)
        _check_splits(self.inputs[0], sent, size)

    def on_host(self, host: HostOperations) -> Call:
        output, tensor = self.outputs[0], self.inputs[0]
        received, sent = self.splits
        received = _element_counts(output, received, host.size)
        sent = _element_counts(tensor, sent, host.size)
        return partial(host.all_to_all_single, output, received, tensor, sent)

    def on_library(self, library: Any) -> list[Work]:
        output, tensor = self.outputs[0], self.inputs[0]
        return torch_releases.all_to_all_single(library, output, tensor, *self.splits, self.options)


class Barrier(Collective):
    """Wait for every rank."""

    __slots__ = ()
    name = operator = "barrier"

    def on_host(self, host: HostOperations) -> Call:
        return host.barrier


def _check_splits(tensor: torch.Tensor, splits: Sequence[int], size: int) -> None:
    """Check that splits sum to a tensor's first dimension; no splits mean equal parts."""
    length = tensor.shape[0] if tensor.shape else 1
    if not splits:
        if length % size:
            raise UnsupportedError(
                f"all_to_all_single: the first dimension, {length}, is not a multiple of {size} "
                "ranks; pass split sizes"
            )
    elif len(splits) != size or sum(splits) != length:
        raise UnsupportedError(
            f"all_to_all_single: the split sizes {list(splits)} must be {size} numbers that sum "
            f"to {length}"
        )


def _element_counts(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of elements of each rank's part of a tensor's first dimension."""
    if not splits:
        return [tensor.numel() // size] * size
    row = math.prod(tensor.shape[1:])
    return [split * row for split in splits]
