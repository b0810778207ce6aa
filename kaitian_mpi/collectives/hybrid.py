"""Allreduce over ranks of unlike device kinds.

Inside a group (the ranks of one kind) data moves by the vendor's library, or by MPI where MPI
reaches the memory. Between groups it moves by the relay: device, host, MPI, host, device.

`flat`
    One MPI allreduce over all ranks, each through its own host memory.
`leader`
    Reduce to the leader of each group, allreduce among the leaders, broadcast in the group.
`striped`
    As `leader`, with as many leaders (lanes) as the smallest group has ranks, each for its share.
    `leader` is the case of one lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kaitian_mpi.collectives.staging import relay_in_chunks
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import WIDER, Reduction
from kaitian_mpi.mpi.topology import GroupComms

ALGORITHMS = ("flat", "leader", "striped")

_WIDE_ELEMENTS = 1 << 20  # of a tensor that is widened, how many at once: 4 MB of float32


class GroupCollectives(Protocol):
    """What the algorithms need inside a group; tensors are flat."""

    rank: int
    size: int

    def reduce_shares(self, tensor: torch.Tensor, shares: Sequence[int], op: Reduction) -> None:
        """Reduce piece r of `tensor` to group rank r."""
        ...

    def spread_shares(self, tensor: torch.Tensor, shares: Sequence[int]) -> None:
        """Copy piece r of `tensor` from group rank r to every rank of the group."""
        ...


class HostGroup:
    """The ranks of one kind, joined by MPI; what is not in host memory goes through it."""

    def __init__(self, comms: GroupComms) -> None:
        self._comm = comms.group
        self.rank, self.size = comms.group.rank, comms.group.size

    def reduce_shares(self, tensor: torch.Tensor, shares: Sequence[int], op: Reduction) -> None:
        """Reduce piece r of `tensor` to group rank r."""
        host_collectives.reduce_shares(self._comm, tensor, shares, op)

    def spread_shares(self, tensor: torch.Tensor, shares: Sequence[int]) -> None:
        """Copy piece r of `tensor` from group rank r to every rank of the group."""
        host_collectives.spread_shares(self._comm, tensor, shares)


def allreduce(
    algorithm: str,
    comms: GroupComms,
    group: GroupCollectives,
    tensor: torch.Tensor,
    op: Reduction,
) -> None:
    """Leave the reduction over all ranks in `tensor`, in place. Collective over `comms.world`.

    Args:
        algorithm: `leader` or `striped`, the same on every rank.
        comms: the world split by kind.
        group: what joins this rank's group for tensors on this device.
        tensor: flat and contiguous, of a type that can be reduced so.
        op: how to reduce.
    """
    if op.is_average and tensor.dtype in WIDER:
        # The sum of a stage would be rounded, or overflow, before it is divided.
        for piece in tensor.split(_WIDE_ELEMENTS):
            wide = piece.to(WIDER[tensor.dtype])
            allreduce(algorithm, comms, group, wide, op)
            piece.copy_(wide)
        return
    total = op.undivided
    shares = split_evenly(tensor.numel(), 1 if algorithm == "leader" else comms.lanes)
    group.reduce_shares(tensor, shares, total)
    if comms.lane is not None and group.rank < len(shares):
        lane = comms.lane

        def exchange(chunk: torch.Tensor) -> None:
            host_collectives.allreduce_chunk(lane, chunk, total)
            # Here, on the host: a device may divide with another last bit than its peers.
            op.divide_average(chunk, comms.world.size)

        own = tensor.split(shares)[group.rank]
        relay_in_chunks(host_collectives.allreduce_chunks(lane, own), exchange)
    group.spread_shares(tensor, shares)


def split_evenly(total: int, parts: int) -> list[int]:
    """Cut a length into parts that differ by at most one."""
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]
