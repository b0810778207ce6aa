"""Collectives in host memory of ranks that have a relay, through which long tensors pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives import rounds, staging
from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker
from kaitian_mpi.distributed.collectives.host import (
    EXACT,
    HostOperations,
    Pieces,
    Precision,
    Tensors,
    exchange_at_once,
    reduce_scatter_at_once,
    reduce_to,
)
from kaitian_mpi.distributed.collectives.staging import contiguous, from_host
from kaitian_mpi.mpi.datatypes import as_raw_buffer
from kaitian_mpi.mpi.host_collectives import SHORT_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.network.link import Link
    from kaitian_mpi.distributed.relay.relay import Relay
    from kaitian_mpi.mpi.datatypes import Reduction


class RelayedOperations(HostOperations):
    """The collectives of ranks of which some have an accelerator, or that are of several kinds.

    If some rank has an accelerator, its long tensors are copied in rounds through the relay's
    buffers, on all ranks: those of a rank without one pass in the same rounds.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        arrivals: ArrivalTracker,
        links: Mapping[int, Link],
        relay: Relay,
    ) -> None:
        """Store the communicator, its links between hosts, and the relay."""
        super().__init__(comm, arrivals, links)
        self._relay = relay

    def _is_long(self, nbytes: int) -> bool:
        """Return whether so many bytes, on all ranks, pass in rounds."""
        return self._relay.has_accelerators and nbytes > staging.MAX_PINNED_BYTES

    def allreduce_flat(
        self, tensor: torch.Tensor, op: Reduction, precision: Precision = EXACT
    ) -> None:
        if tensor.nbytes <= SHORT_BYTES:
            super().allreduce_flat(tensor, op, precision)
            return
        self._sizes.check_equal([tensor.nbytes])
        dense = contiguous(tensor)
        exchange = self._allreduce_on(self._comm, precision.residual)
        relay = self._relay
        dtype = precision.dtype
        if dtype is None and dense.is_cpu and not relay.has_accelerators:
            exchange(dense, op)
        else:
            relay.exchange(self._comm, dense.view(-1), lambda chunk: exchange(chunk, op), dtype)
        from_host(dense, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if not self._is_long(tensor.nbytes):
            super().broadcast(tensor, root)
            return
        self._sizes.check_equal([tensor.nbytes])

        def share(part: torch.Tensor) -> None:
            self._complete(self._comm.Ibcast(as_raw_buffer(part), root), part)

        is_root = self.rank == root
        rounds.in_rounds(self._comm, self._relay, tensor, share, reads=is_root, writes=not is_root)

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> None:
        if not self._is_long(tensor.nbytes):
            super().reduce(tensor, root, op)
            return
        self._sizes.check_equal([tensor.nbytes])

        def add(part: torch.Tensor) -> None:
            reduce_to(self._comm, part, root, op)

        is_root = self.rank == root
        rounds.in_rounds(self._comm, self._relay, tensor, add, reads=True, writes=is_root)

    def all_gather(self, pieces: Tensors, tensor: torch.Tensor) -> None:
        if not self._is_long(self.size * max(piece.nbytes for piece in pieces)):
            super().all_gather(pieces, tensor)
            return
        self._sizes.check_gather(pieces, tensor)
        rounds.all_gather_in_rounds(self._comm, self._relay, pieces, tensor)

    def all_gather_together(self, lists: Sequence[Tensors], tensors: Tensors) -> None:
        for pieces, tensor in zip(lists, tensors, strict=True):
            self.all_gather(pieces, tensor)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        if not self._is_long(output.nbytes):
            super().all_gather_single(output, tensor)
            return
        dense = contiguous(output)
        parts = dense.view(-1).split(tensor.numel())
        self._sizes.check_gather(parts, tensor)
        rounds.all_gather_in_rounds(self._comm, self._relay, parts, tensor)
        from_host(dense, output)

    def reduce_scatter(self, output: torch.Tensor, pieces: Tensors, op: Reduction) -> None:
        self._sizes.check_equal([piece.nbytes for piece in pieces])
        if not rounds.reduce_scatter_in_rounds(self._comm, self._relay, output, pieces, op):
            reduce_scatter_at_once(self._comm, output, pieces, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction
    ) -> None:
        if self._is_long(tensor.nbytes):
            parts = contiguous(tensor).view(-1).split(output.numel())
            self.reduce_scatter(output, parts, op)
        else:
            super().reduce_scatter_single(output, tensor, op)

    def all_to_all(self, received: Pieces, sent: Pieces) -> None:
        # One rank may have long pieces, and others none.
        if self._is_long(self._sizes.check_exchange(sent, received)):
            received = received or [None] * self.size
            rounds.exchange_in_rounds(self._comm, self._relay, sent, received)
        else:
            exchange_at_once(self._comm, received, sent)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        received_counts: Sequence[int],
        tensor: torch.Tensor,
        sent_counts: Sequence[int],
    ) -> None:
        if self._relay.has_accelerators:
            dense = contiguous(output)
            pieces = dense.view(-1).split([*received_counts])
            parts = contiguous(tensor).view(-1).split([*sent_counts])
            # One rank may have long pieces, and others none.
            if self._is_long(self._sizes.check_exchange(parts, pieces)):
                rounds.exchange_in_rounds(self._comm, self._relay, parts, pieces)
                from_host(dense, output)
                return
        super().all_to_all_single(output, received_counts, tensor, sent_counts)
