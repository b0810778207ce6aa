"""Collectives through host memory, for tensors on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker
from kaitian_mpi.distributed.collectives.sizes import Sizes
from kaitian_mpi.distributed.collectives.staging import from_host, to_host, writing
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi import host_collectives, pairwise
from kaitian_mpi.mpi.datatypes import SUM, as_buffer, as_raw_buffer, separate
from kaitian_mpi.mpi.host_collectives import SHORT_BYTES, start_all_to_all, start_allreduce

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.network.link import Link
    from kaitian_mpi.distributed.residual import Residual
    from kaitian_mpi.mpi.datatypes import Reduction

Tensors = Sequence[torch.Tensor]
Pieces = Sequence[torch.Tensor | None]

_SIZE_BYTES = 8  # of an int64
_LONG_GATHER_BYTES = 4 << 20
"""From this size on, ranks exchange parts as fast as MPI gathers them, without copying a list's."""


class Precision(NamedTuple):
    """The rounding that an all_reduce allows; the same on every rank."""

    dtype: torch.dtype | None = None
    """The dtype in which the tensor crosses between device kinds; None: its own."""
    residual: Residual | None = None
    """Keeps what slow links round off a buffer of gradients; None: they round nothing off."""


EXACT = Precision()


class HostOperations:
    """The collectives of one communicator, in host memory. Every method is collective.

    Each sleeps until all ranks have arrived; blocking calls that may follow spin. Contiguous host
    tensors are used in place, others are copied whole; see `RelayedOperations` for long ones.
    Pieces are lists of tensors by rank, whose sizes may differ between ranks as long as sender and
    receiver agree.
    """

    algorithm = "flat"
    """The algorithm of `allreduce`: a name in `algorithms`; must be the same on every rank."""
    algorithms: tuple[str, ...] = (algorithm,)
    """The algorithms that exist for these ranks."""

    def __init__(
        self, comm: MPI.Intracomm, arrivals: ArrivalTracker, links: Mapping[int, Link]
    ) -> None:
        """Store the communicator, and its links between hosts."""
        self.rank = comm.rank
        self.size = comm.size
        self._comm = comm
        self._links = links
        self.barrier = arrivals.arrive
        self._complete = arrivals.complete
        self._sizes = Sizes(comm, arrivals)

    def use_algorithm(self, name: str) -> None:
        """Set the algorithm of `allreduce` to one of `algorithms`, the same on every rank."""
        self.algorithm = name

    def allreduce(self, tensor: torch.Tensor, op: Reduction, precision: Precision = EXACT) -> None:
        self.allreduce_flat(tensor, op, precision)

    def sum_gradients(self, buffer: torch.Tensor, residual: Residual | None) -> None:
        """Sum a flat buffer of gradients over all ranks, in place."""
        self.allreduce(buffer, SUM, Precision(residual=residual))

    def allreduce_flat(
        self, tensor: torch.Tensor, op: Reduction, precision: Precision = EXACT
    ) -> None:
        """Reduce `tensor` over all ranks at once, in host memory."""
        if tensor.nbytes <= SHORT_BYTES:
            host = to_host(tensor)
            wide = op.in_supported_dtype(host)
            self._complete(start_allreduce(self._comm, wide, op), wide)
            op.divide_average(wide, self.size)
            if wide is not host:
                host.copy_(wide)
            from_host(host, tensor)
            return
        self._sizes.check_equal([tensor.nbytes])
        host = to_host(tensor)
        self._allreduce_on(self._comm, precision.residual)(host, op)
        from_host(host, tensor)

    def _allreduce_on(
        self, comm: MPI.Comm, residual: Residual | None, start: int = 0
    ) -> Callable[[torch.Tensor, Reduction], None]:
        """Return a function that reduces host tensors, the parts of a buffer from `start` on."""
        link = self._links.get(comm.py2f())
        if link is None:
            return partial(host_collectives.allreduce, comm)
        return link.reduce_to_all if residual is None else link.gradient_sum(residual, start)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if tensor.nbytes <= SHORT_BYTES:
            self._broadcast_short(tensor, root)
            return
        self._sizes.check_equal([tensor.nbytes])
        host = to_host(tensor, read=self.rank == root)
        self._complete(self._comm.Ibcast(as_raw_buffer(host), root), host)
        if self.rank != root:
            from_host(host, tensor)

    def _broadcast_short(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast a tensor after its size: the root, which waits for nobody, needs no other's.

        Raises:
            CollectiveError: the root's tensor has another size.
        """
        nbytes = tensor.nbytes
        # Memory for any short message: MPI would write a longer one beyond the buffer's end.
        memory = torch.empty(SHORT_BYTES + _SIZE_BYTES, dtype=torch.uint8)
        message = memory[: nbytes + _SIZE_BYTES]
        size = message[:_SIZE_BYTES]
        content = message[_SIZE_BYTES:]
        size.view(torch.int64).fill_(nbytes if self.rank == root else -1)
        if self.rank == root:
            content.copy_(to_host(tensor).view(-1).view(torch.uint8))
        try:
            self._complete(self._comm.Ibcast(as_raw_buffer(message), root), message)
        except Exception as error:
            if (unlike := pairwise.broadcast_error(error)) is None:
                raise
            raise unlike from error
        if self.rank != root:
            if size.view(torch.int64).item() != nbytes:
                raise CollectiveError(pairwise.DIFFERENT_SIZES)
            host = to_host(tensor, read=False)
            host.view(-1).view(torch.uint8).copy_(content)
            from_host(host, tensor)

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> None:
        """Reduce `tensor` to rank `root`, in place; the other ranks' tensors are unchanged."""
        self._sizes.check_equal([tensor.nbytes])
        host = to_host(tensor)
        reduce_to(self._comm, host, root, op)
        if self.rank == root:
            from_host(host, tensor)

    def all_gather(self, pieces: Tensors, tensor: torch.Tensor) -> None:
        """Gather every rank's tensor into `pieces`, which may differ in length.

        Equal ones go as in `all_gather_single`: Accelerate calls either, by a rank's own device.
        """
        are_equal = all(piece.numel() == tensor.numel() for piece in pieces)
        if not are_equal or self.size * tensor.nbytes > _LONG_GATHER_BYTES:
            self.all_to_all(pieces, [tensor] * self.size)
            return
        whole = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        self.all_gather_single(whole, tensor)
        for piece, part in zip(pieces, whole, strict=True):
            with writing([piece]):
                piece.detach().copy_(part.view(piece.shape))

    def all_gather_together(self, lists: Sequence[Tensors], tensors: Tensors) -> None:
        """Gather every rank's `tensors[i]`, which is contiguous, into `lists[i]`, all at once."""
        transfers = [
            ([tensor] * self.size, [*pieces]) for pieces, tensor in zip(lists, tensors, strict=True)
        ]
        self._sizes.check_exchanges(transfers)
        pairwise.exchange_all(self._comm, transfers)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather every rank's tensor into one, along its first dimension."""
        host = to_host(output, read=False)
        source = separate(to_host(tensor), host)
        buffers = as_raw_buffer(source), as_raw_buffer(host)
        # Two ranks gather long parts faster by MPI's blocking call, once both have arrived.
        nonblocking_bytes = SHORT_BYTES if self.size == 2 else _LONG_GATHER_BYTES
        if host.nbytes <= nonblocking_bytes:
            self._complete(self._comm.Iallgather(*buffers), host, source)
        else:
            self._sizes.check_equal([source.nbytes])
            if host.nbytes <= _LONG_GATHER_BYTES:
                self._comm.Allgather(*buffers)
            else:
                parts = host.view(-1).split(source.numel())
                pairwise.exchange(self._comm, [source] * self.size, parts)
        from_host(host, output)

    def gather(self, pieces: Tensors, tensor: torch.Tensor, root: int) -> None:
        """Gather every rank's tensor into `pieces` on rank `root`; `pieces` is empty elsewhere."""
        sent: list[torch.Tensor | None] = [None] * self.size
        sent[root] = tensor
        self.all_to_all(pieces, sent)

    def scatter(self, tensor: torch.Tensor, pieces: Tensors, root: int) -> None:
        """Scatter rank `root`'s `pieces` into each rank's `tensor`; `pieces` is empty elsewhere."""
        received: list[torch.Tensor | None] = [None] * self.size
        received[root] = tensor
        sent: list[torch.Tensor | None] = [None] * self.size
        if pieces:
            sent = [*pieces]
        self.all_to_all(received, sent)

    def reduce_scatter(self, output: torch.Tensor, pieces: Tensors, op: Reduction) -> None:
        """Reduce `pieces[r]` into `output` on rank r."""
        self._sizes.check_equal([piece.nbytes for piece in pieces])
        reduce_scatter_at_once(self._comm, output, pieces, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction
    ) -> None:
        """Reduce equal part r of `tensor`'s first dimension into `output` on rank r."""
        host = to_host(output, read=False)
        source = to_host(tensor)
        if source.nbytes <= SHORT_BYTES:
            wide_source = separate(op.in_supported_dtype(source), host)
            wide = host if wide_source is source else host.to(wide_source.dtype)
            request = self._comm.Ireduce_scatter_block(
                as_buffer(wide_source), as_buffer(wide), op.mpi_op
            )
            self._complete(request, wide, wide_source)
            op.divide_average(wide, self.size)
            if wide is not host:
                host.copy_(wide)
        else:
            self._sizes.check_equal([source.nbytes])
            host_collectives.reduce_scatter(self._comm, host, source, op)
        from_host(host, output)

    def all_to_all(self, received: Pieces, sent: Pieces) -> None:
        """Send `sent[r]` to rank r and receive `received[r]` from it, if there are such."""
        self._sizes.check_exchange(sent, received)
        exchange_at_once(self._comm, received, sent)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        received_counts: Sequence[int],
        tensor: torch.Tensor,
        sent_counts: Sequence[int],
    ) -> None:
        """Like `all_to_all`, with all pieces in one tensor; counts are in elements.

        The sizes come first, but each rank compares only those that it is to receive: for short
        pieces that takes a tenth longer, a comparison by all ranks half as long again.
        """
        host = to_host(output, read=False)
        source = to_host(tensor)
        source = separate(source, host)
        leaving = np.array([count * source.itemsize for count in sent_counts])
        arriving = np.empty_like(leaving)
        self._complete(self._comm.Ialltoall(leaving, arriving), leaving, arriving)
        sizes = arriving.tolist()
        are_unlike = sizes != [count * host.itemsize for count in received_counts]
        if are_unlike:  # in memory of its own, so that the other ranks do not wait for this one
            host = torch.empty(sum(sizes), dtype=torch.uint8)
            received_counts = sizes
        request = start_all_to_all(self._comm, host, received_counts, source, sent_counts)
        self._complete(request, host, source)
        if are_unlike:
            raise CollectiveError(pairwise.DIFFERENT_SIZES)
        from_host(host, output)


def reduce_to(comm: MPI.Comm, host: torch.Tensor, root: int, op: Reduction) -> None:
    """Reduce a host tensor to rank `root`, in place. Collective."""
    host_collectives.reduce_pieces(comm, host, [0] * root + [host.numel()], op)


def reduce_scatter_at_once(
    comm: MPI.Comm, output: torch.Tensor, pieces: Tensors, op: Reduction
) -> None:
    """Reduce `pieces[r]` into `output` on rank r, by host copies of all. Collective."""
    host = to_host(output, read=False)
    parts = [to_host(piece).view(-1) for piece in pieces]
    pairwise.reduce_scatter(comm, host.view(-1), parts, op)
    from_host(host, output)


def exchange_at_once(comm: MPI.Comm, received: Pieces, sent: Pieces) -> None:
    """Send `sent[r]` to rank r and receive `received[r]`, by host copies of all. Collective."""
    # One copy of each, as a gather sends the same tensor to all ranks.
    copies = {id(piece): to_host(piece) for piece in sent if piece is not None}
    sources = [None if piece is None else copies[id(piece)] for piece in sent]
    received = received or [None] * comm.size
    targets = [None if piece is None else to_host(piece, read=False) for piece in received]
    sources = pairwise.without_shared_memory(comm.rank, sources, targets)
    pairwise.exchange(comm, sources, targets)
    for target, piece in zip(targets, received, strict=True):
        if target is not None and piece is not None:
            from_host(target, piece)
