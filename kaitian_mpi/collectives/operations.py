"""Collectives through host memory, for tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kaitian_mpi.collectives.staging import on_host
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.runtime import wait_quietly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI


_PLAIN = torch.contiguous_format


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type a reduction computes in: 16-bit floats are summed in float32 and rounded once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def plain(op: Any) -> Any:
    """The operation that MPI does for torch's: an average is a sum, divided afterwards."""
    return dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op


def mpi_reduction(dtype: torch.dtype, op: Any) -> MPI.Op:
    """Return MPI's operation for a reduction of tensors of this type.

    Raises:
        UnsupportedError: there is none.
    """
    return host_collectives.reduction(wide(dtype), plain(op))


@contextmanager
def reducible(
    tensor: torch.Tensor, op: Any, size: int, *, read: bool = True, write: bool = True
) -> Iterator[torch.Tensor]:
    """Lend a contiguous copy of `tensor` in the type it is reduced in, or `tensor` itself.

    Args:
        tensor: on any device; the copy is on the same.
        op: torch's operation; an average is divided by `size` at the end.
        size: how many ranks are averaged over.
        read: whether the tensor's values are needed.
        write: whether the result goes back to the tensor.
    """
    dtype = wide(tensor.dtype)
    if read:
        lent = tensor.to(dtype).contiguous()
    else:
        fits = dtype == tensor.dtype and tensor.is_contiguous()
        lent = tensor if fits else torch.empty_like(tensor, dtype=dtype, memory_format=_PLAIN)
    yield lent
    if write:
        if op == dist.ReduceOp.AVG:
            average(lent, size)
        if lent is not tensor:
            tensor.copy_(lent)


def average(total: torch.Tensor, size: int) -> None:
    """Divide a sum by the number of ranks, in place; integers towards zero, as in C."""
    if total.is_floating_point() or total.is_complex():
        total.div_(size)
    else:
        total.div_(size, rounding_mode="trunc")


class HostOperations:
    """The collectives of one communicator, in host memory. Every method is collective.

    Pieces are lists of tensors by rank. They may differ in size between ranks where sender and
    receiver agree.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` from rank `root` to every rank."""
        wait_quietly(self._comm)
        is_root = self._comm.rank == root
        with on_host(tensor, read=is_root, write=not is_root) as host:
            host_collectives.broadcast(self._comm, host, root)

    def reduce(self, tensor: torch.Tensor, root: int, op: Any) -> None:
        """Leave the reduction in `tensor` on rank `root`; the other ranks' tensors stay."""
        wait_quietly(self._comm)
        is_root = self._comm.rank == root
        with (
            reducible(tensor, op, self._comm.size, write=is_root) as lent,
            on_host(lent, write=is_root) as host,
        ):
            host_collectives.reduce(self._comm, host, root, mpi_reduction(tensor.dtype, op))

    def sum_sparse(self, tensor: torch.Tensor) -> None:
        """Leave the sum of the ranks' `torch.sparse_coo` tensors in each, coalesced."""
        own = tensor.coalesce()
        indices, entries = own.indices(), own.values()
        found = torch.zeros(self._comm.size, dtype=torch.int64)
        self.all_gather_single(found, torch.tensor([indices.size(1)]))
        # As rows of entries, so that the pieces of the ranks are neighbours in memory.
        places = [indices.new_empty((count, indices.size(0))) for count in found.tolist()]
        values = [entries.new_empty((count, *entries.shape[1:])) for count in found.tolist()]
        self.all_gather(places, indices.t())
        self.all_gather(values, entries)
        total = torch.sparse_coo_tensor(torch.cat(places).t(), torch.cat(values), tensor.shape)
        tensor.copy_(total.coalesce())

    def all_gather(self, pieces: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Gather every rank's tensor into `pieces`."""
        wait_quietly(self._comm)
        counts = [piece.numel() for piece in pieces]
        with on_host(tensor, write=False) as own:
            gathered = own.new_empty(sum(counts))
            host_collectives.all_gather(self._comm, gathered, own, counts)
        spread(gathered, pieces)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather every rank's tensor into one, along its first dimension."""
        wait_quietly(self._comm)
        counts = [tensor.numel()] * self._comm.size
        with on_host(tensor, write=False) as own, on_host(output, read=False) as gathered:
            host_collectives.all_gather(self._comm, gathered, own, counts)

    def gather(self, pieces: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """Gather every rank's tensor into `pieces` on rank `root`; elsewhere they are empty."""
        wait_quietly(self._comm)
        is_root = self._comm.rank == root
        with on_host(tensor, write=False) as own:
            gathered = own.new_empty(own.numel() * self._comm.size) if is_root else None
            host_collectives.gather(self._comm, gathered, own, root)
        if gathered is not None:
            spread(gathered, pieces)

    def scatter(self, tensor: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> None:
        """Give every rank its piece of rank `root`'s; elsewhere `pieces` is empty."""
        wait_quietly(self._comm)
        with on_host(tensor, read=False) as own:
            scattered = collect(pieces) if self._comm.rank == root else None
            host_collectives.scatter(self._comm, own, scattered, root)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, counts: Sequence[int], op: Any
    ) -> None:
        """Reduce piece r of `tensor`, `counts[r]` elements long, into `output` on rank r."""
        wait_quietly(self._comm)
        size = self._comm.size
        with (
            reducible(tensor, op, size, write=False) as lent,
            on_host(lent, write=False) as given,
            reducible(output, op, size, read=False) as result,
            on_host(result, read=False) as own,
        ):
            mpi_op = mpi_reduction(tensor.dtype, op)
            host_collectives.reduce_scatter(self._comm, own, given, counts, mpi_op)

    def all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
        """Send `sent[r]` to rank r and receive `received[r]` from it."""
        wait_quietly(self._comm)
        given = collect(sent)
        counts = [piece.numel() for piece in received]
        taken = given.new_empty(sum(counts))
        sent_counts = [piece.numel() for piece in sent]
        host_collectives.all_to_all(self._comm, taken, counts, given, sent_counts)
        spread(taken, received)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        received_counts: Sequence[int],
        tensor: torch.Tensor,
        sent_counts: Sequence[int],
    ) -> None:
        """As `all_to_all`, with the pieces in one tensor; counts are of elements."""
        wait_quietly(self._comm)
        with ExitStack() as stack:
            given = stack.enter_context(on_host(tensor, write=False))
            taken = stack.enter_context(on_host(output, read=False))
            host_collectives.all_to_all(self._comm, taken, received_counts, given, sent_counts)


def collect(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the pieces' values one after the other, as one flat host tensor."""
    return torch.cat([piece.reshape(-1) for piece in pieces]).cpu()


def spread(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Put the values of a flat host tensor into the pieces, one after the other."""
    parts = flat.split([piece.numel() for piece in pieces])
    for part, piece in zip(parts, pieces, strict=True):
        piece.copy_(part.view(piece.shape))
