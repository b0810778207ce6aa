"""Collectives between several groups of ranks, with an allreduce that uses vendor libraries.

`flat` is one MPI allreduce over all ranks. `striped` reduces inside each group, then among lanes of
one rank per group, each for an equal part, and gathers inside the group; `leader` has one lane.
`leader-by-host` and `striped-by-host` do so in groups by kind and host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives.across_groups import (
    Members,
    PieceOperations,
    all_gather_across,
    reduce_scatter_across,
)
from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker
from kaitian_mpi.distributed.collectives.host import EXACT, Precision, Tensors
from kaitian_mpi.distributed.collectives.relayed import RelayedOperations
from kaitian_mpi.distributed.collectives.staging import contiguous, from_host, to_host
from kaitian_mpi.distributed.relay.relay import Relay
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import ACCUMULATION_DTYPES, SUM, Reduction
from kaitian_mpi.mpi.topology import GroupComms
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import part

if TYPE_CHECKING:
    from kaitian_mpi.distributed.collectives.vendor import VendorLibrary
    from kaitian_mpi.distributed.network.link import Link
    from kaitian_mpi.distributed.residual import Residual

_WIDE_ELEMENTS = 1 << 20  # converted to a wider dtype at once: 4 MB of float32
_LONG_BYTES = 1 << 20  # reduced and gathered inside the groups first
_MAX_WIDE_BYTES = 64 << 10  # up to which a message's fixed cost is what counts

ALGORITHMS = ("flat", "leader", "striped")
"""The allreduce algorithms, in the order in which they are measured."""
BY_HOST = ("leader-by-host", "striped-by-host")
"""Further ones, if there are groups by kind and host beside those by kind."""


class HybridOperations(RelayedOperations):
    """The collectives of ranks of several groups: in host memory, except for the allreduce."""

    def __init__(
        self,
        comms: GroupComms,
        libraries: Sequence[VendorLibrary],
        arrivals: ArrivalTracker,
        links: Mapping[int, Link],
        relay: Relay,
        joins_ranks: bool = False,
    ) -> None:
        """Store the communicators, and a library for each way to group the ranks, if any.

        `joins_ranks` is the same on all ranks: whether some group of several has a library.
        """
        super().__init__(comms.world, arrivals, links, relay)
        self._joins_ranks = joins_ranks
        self.algorithms = ALGORITHMS
        self._by_kind = self._by_host = comms, libraries[0] if libraries else None
        if comms.by_host is not None:
            self.algorithms += BY_HOST
            self._by_host = comms.by_host, libraries[1] if libraries else None

    def sum_gradients(self, buffer: torch.Tensor, residual: Residual | None) -> None:
        is_long = buffer.dtype is torch.float32 and buffer.nbytes > _MAX_WIDE_BYTES
        narrow = is_long and self._relay.settings.relay_dtype == "bf16"
        self.allreduce(buffer, SUM, Precision(torch.bfloat16 if narrow else None, residual))

    def allreduce(self, tensor: torch.Tensor, op: Reduction, precision: Precision = EXACT) -> None:
        if recorder.current is not None:
            recorder.current.annotate(algorithm=self.algorithm)
        if self.algorithm == "flat":
            self.allreduce_flat(tensor, op, precision)
            return
        comms, library = self._by_host if self.algorithm in BY_HOST else self._by_kind
        lanes = 1 if self.algorithm.startswith("leader") else comms.lanes
        self._sizes.check_equal([tensor.nbytes])
        kind = op.without_division.kind
        if library is not None and library.serves("reduce", [tensor.dtype], kind):
            usable = library.usable(tensor.detach())
            operations = PieceOperations(library.reduce_pieces, library.gather_pieces)
        else:
            # Without a vendor's library a group works in host memory; a single rank need not.
            usable = contiguous(tensor) if comms.group.size == 1 else to_host(tensor)
            operations = _by_mpi(comms)
        self._allreduce(operations, usable.view(-1), op, precision, comms, lanes)
        from_host(usable, tensor)

    def reduce_scatter(self, output: torch.Tensor, pieces: Tensors, op: Reduction) -> None:
        if not self._sums_in_groups(pieces, op):
            super().reduce_scatter(output, pieces, op)
            return
        self._sizes.check_equal([piece.nbytes for piece in pieces])
        members = self._members("reduce", output)
        reduce_scatter_across(self._comm, members, self._relay, output, pieces, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction
    ) -> None:
        parts = contiguous(tensor).view(-1).split(max(1, output.numel()))
        if self._sums_in_groups(parts, op):
            self.reduce_scatter(output, parts, op)
        else:
            super().reduce_scatter_single(output, tensor, op)

    def all_gather(self, pieces: Tensors, tensor: torch.Tensor) -> None:
        if not self._crosses_once(pieces):
            super().all_gather(pieces, tensor)
            return
        self._sizes.check_gather(pieces, tensor)
        members = self._members("broadcast", tensor)
        all_gather_across(self._comm, members, self._relay, pieces, tensor)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        dense = contiguous(output)
        parts = dense.view(-1).split(max(1, tensor.numel()))
        if self._crosses_once(parts):
            self.all_gather(parts, tensor)
            from_host(dense, output)
        else:
            super().all_gather_single(output, tensor)

    def _sums_in_groups(self, parts: Tensors, op: Reduction) -> bool:
        """Return whether all ranks' parts are summed inside the groups first."""
        if op.without_division is not SUM or not self._crosses_once(parts):
            return False
        # Sums of 16-bit floats cross in 32 bits, so that they are rounded once.
        dtype = parts[0].dtype
        widens = ACCUMULATION_DTYPES.get(dtype, dtype).itemsize // dtype.itemsize
        return widens * (len(self._by_kind[0].groups) - 1) < self.size - 1

    def _crosses_once(self, parts: Tensors) -> bool:
        """Return whether all ranks' parts are long enough to move inside the groups first."""
        dtype = parts[0].dtype
        is_long = dtype.is_floating_point and sum(part.nbytes for part in parts) >= _LONG_BYTES
        return self._joins_ranks and is_long

    def _members(self, name: str, tensor: torch.Tensor) -> Members:
        """Return the operations of this rank's group, of its library if that has them."""
        comms, library = self._by_kind
        groups = [group.ranks for group in comms.groups]
        ranks = comms.own.ranks
        dtype = ACCUMULATION_DTYPES.get(tensor.dtype, tensor.dtype)
        kind = SUM.kind if name == "reduce" else None
        if library is not None and library.serves(name, [dtype if kind else tensor.dtype], kind):
            operations = PieceOperations(library.reduce_pieces, library.gather_pieces)
            return Members(groups, ranks, library.device, operations)
        is_alone = comms.group.size == 1
        device = tensor.device if is_alone else torch.device("cpu")
        return Members(groups, ranks, device, _by_mpi(comms))

    def _allreduce(
        self,
        operations: PieceOperations,
        tensor: torch.Tensor,
        op: Reduction,
        precision: Precision,
        comms: GroupComms,
        lanes: int,
    ) -> None:
        """Reduce a flat, contiguous tensor over all ranks, in place. Collective.

        `operations` reduces and gathers the members' pieces of it inside the group.
        """
        if op.is_average and tensor.dtype in ACCUMULATION_DTYPES:
            # Otherwise a stage's sum would be rounded, or overflow, before it is divided.
            for piece in tensor.split(_WIDE_ELEMENTS):
                wide = piece.to(ACCUMULATION_DTYPES[tensor.dtype])
                self._allreduce(operations, wide, op, precision, comms, lanes)
                piece.copy_(wide)
            return
        total = op.without_division
        by_lane = tensor.tensor_split(lanes)
        shares = [len(piece) for piece in by_lane]
        with part("reduce in the group"):
            operations.reduce_pieces(tensor, shares, total)
        rank = comms.group.rank
        lane = comms.lane
        if lane is not None and rank < len(shares):
            allreduce = self._allreduce_on(lane, precision.residual, sum(shares[:rank]))

            def exchange(chunk: torch.Tensor) -> None:
                allreduce(chunk, total)
                # On the host, because devices may differ in the last bit of a division.
                op.divide_average(chunk, self.size)

            self._relay.exchange(lane, by_lane[rank], exchange, precision.dtype)
        with part("gather in the group"):
            operations.gather_pieces(tensor, shares)


def _by_mpi(comms: GroupComms) -> PieceOperations:
    """Return the operations of a group in host memory, without a vendor's library."""
    return PieceOperations(
        partial(host_collectives.reduce_pieces, comms.group),
        partial(host_collectives.gather_pieces, comms.group),
    )
