"""Collectives through host memory, for tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.collectives.arrivals import ArrivalTracker
from kaitian_mpi.collectives.staging import contiguous, from_host, relay_in_chunks, to_host
from kaitian_mpi.mpi import host_collectives, nonblocking, pairwise

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.datatypes import Reduction

Tensors = Sequence[torch.Tensor]


class HostOperations:
    """The collectives of one communicator, in host memory. Every method is collective.

    Each waits for the other ranks asleep. Contiguous host tensors are used where they are, others
    by a copy. Pieces are lists of tensors by rank, and may differ in size between ranks where
    sender and receiver agree.
    """

    def __init__(self, comm: MPI.Comm, arrivals: ArrivalTracker) -> None:
        """Prepare for the ranks of `comm`, whose arrivals are tracked by `arrivals`."""
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm
        self.barrier = self._arrive = arrivals.arrive
        self._complete = arrivals.complete

    def allreduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Leave the reduction in `tensor` on every rank."""
        if nonblocking.is_short_reduction(tensor):
            host = to_host(tensor)
            wide = op.in_supported_dtype(host)
            self._complete(nonblocking.allreduce(self._comm, wide, op), wide)
            op.divide_average(wide, self._comm.size)
            if wide is not host:
                host.copy_(wide)
            from_host(host, tensor)
            return
        self._arrive()
        lent = contiguous(tensor)
        if lent.is_cpu:
            host_collectives.allreduce(self._comm, lent, op)
        else:
            chunks = host_collectives.allreduce_chunks(self._comm, lent.view(-1))
            exchange = partial(host_collectives.allreduce_chunk, self._comm, op=op)
            relay_in_chunks(chunks, exchange)
        from_host(lent, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` from rank `root` to every rank."""
        is_root = self._comm.rank == root
        host = to_host(tensor, read=is_root)
        self._complete(nonblocking.broadcast(self._comm, host, root), host)
        if not is_root:
            from_host(host, tensor)

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> None:
        """Leave the reduction in `tensor` on rank `root`; the other ranks' tensors stay."""
        self._arrive()
        host = to_host(tensor)
        host_collectives.reduce(self._comm, host, root, op)
        if self._comm.rank == root:
            from_host(host, tensor)

    def sum_sparse(self, tensor: torch.Tensor) -> None:
        """Leave the sum of the ranks' `torch.sparse_coo` tensors in each, coalesced."""
        own = tensor.detach().coalesce()
        indices, entries = own.indices(), own.values()
        found = torch.zeros(self._comm.size, dtype=torch.int64)
        self.all_gather_single(found, torch.tensor([indices.size(1)]))
        # As rows of entries, so that the pieces of the ranks are neighbours in memory.
        places = [indices.new_empty((count, indices.size(0))) for count in found.tolist()]
        values = [entries.new_empty((count, *entries.shape[1:])) for count in found.tolist()]
        self.all_gather(places, indices.t())
        self.all_gather(values, entries)
        total = torch.sparse_coo_tensor(torch.cat(places).t(), torch.cat(values), tensor.shape)
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    def all_gather(self, pieces: Tensors, tensor: torch.Tensor) -> None:
        """Gather every rank's tensor into `pieces`."""
        self._exchange([to_host(tensor)] * self._comm.size, pieces)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather every rank's tensor into one, along its first dimension."""
        host, given = to_host(output, read=False), to_host(tensor)
        if nonblocking.use_nonblocking_all_gather(self._comm, host):
            self._complete(nonblocking.all_gather(self._comm, host, given), host, given)
        else:
            self._arrive()
            host_collectives.all_gather(self._comm, host, given)
        from_host(host, output)

    def gather(self, pieces: Tensors, tensor: torch.Tensor, root: int) -> None:
        """Gather every rank's tensor into `pieces` on rank `root`; elsewhere they are empty."""
        sent: list[torch.Tensor | None] = [None] * self._comm.size
        sent[root] = to_host(tensor)
        self._exchange(sent, pieces)

    def scatter(self, tensor: torch.Tensor, pieces: Tensors, root: int) -> None:
        """Give every rank its piece of rank `root`'s; elsewhere `pieces` is empty."""
        received: list[torch.Tensor | None] = [None] * self._comm.size
        received[root] = tensor
        sent: list[torch.Tensor | None] = [None] * self._comm.size
        if pieces:
            sent = [to_host(piece) for piece in pieces]
        self._exchange(sent, received)

    def reduce_scatter(self, output: torch.Tensor, pieces: Tensors, op: Reduction) -> None:
        """Reduce `pieces[r]` into `output` on rank r."""
        self._arrive()
        host = to_host(output, read=False)
        parts = [to_host(piece).view(-1) for piece in pieces]
        pairwise.reduce_scatter(self._comm, host.view(-1), parts, op)
        from_host(host, output)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction
    ) -> None:
        """Reduce equal part r of `tensor`'s first dimension into `output` on rank r."""
        host, given = to_host(output, read=False), to_host(tensor)
        if nonblocking.is_short_reduction(given):
            wide_given = op.in_supported_dtype(given)
            wide = host if wide_given is given else host.to(wide_given.dtype)
            request = nonblocking.reduce_scatter(self._comm, wide, wide_given, op)
            self._complete(request, wide, wide_given)
            op.divide_average(wide, self._comm.size)
            if wide is not host:
                host.copy_(wide)
        else:
            self._arrive()
            host_collectives.reduce_scatter(self._comm, host, given, op)
        from_host(host, output)

    def all_to_all(self, received: Tensors, sent: Tensors) -> None:
        """Send `sent[r]` to rank r and receive `received[r]` from it."""
        self._exchange([to_host(piece) for piece in sent], received)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        received_counts: Sequence[int],
        tensor: torch.Tensor,
        sent_counts: Sequence[int],
    ) -> None:
        """As `all_to_all`, with the pieces in one tensor; counts are of elements."""
        host, given = to_host(output, read=False), to_host(tensor)
        request = nonblocking.all_to_all(self._comm, host, received_counts, given, sent_counts)
        self._complete(request, host, given)
        from_host(host, output)

    def _exchange(
        self, sent: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None]
    ) -> None:
        """Send from host tensors, and receive into tensors anywhere."""
        self._arrive()
        received = received or [None] * self._comm.size
        hosts = [None if piece is None else to_host(piece, read=False) for piece in received]
        pairwise.exchange(self._comm, sent, hosts)
        for host, piece in zip(hosts, received, strict=True):
            if host is not None and piece is not None:
                from_host(host, piece)
