"""What one round of an algorithm has for its exchange between hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.mpi.datatypes import ACCUMULATION_DTYPES, Reduction, as_raw_buffer


class Crossing:
    """The messages between one rank of each host, and the reduction of what they bring.

    Everything that crosses between hosts passes through `start_send` and `start_receive`: what a
    part looks like on the wire is decided here, and nowhere else.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        lane: Sequence[int],
        tag: int,
        op: Reduction,
        scratch: torch.Tensor,
    ) -> None:
        """Store what the round uses.

        Args:
            comm: all ranks.
            lane: the rank of each host that exchanges data in this round.
            tag: for this round alone.
            op: the reduction over all ranks of `comm`.
            scratch: at least as long as the parts of all hosts together; flat.
        """
        self._comm = comm
        self._lane = lane
        self._tag = tag
        self._op = op
        self._scratch = scratch
        self.host = lane.index(comm.rank)
        """The number of this rank's host."""
        self.size = len(lane)
        """The number of hosts."""

    @property
    def others(self) -> list[int]:
        """The other hosts, the next one first, so that not all start with the same one."""
        return [(self.host + distance) % self.size for distance in range(1, self.size)]

    def start_send(self, part: torch.Tensor, host: int) -> MPI.Request:
        """Start sending a part to a host; an empty one is not sent."""
        if not part.numel():
            return MPI.REQUEST_NULL
        return self._comm.Isend(as_raw_buffer(part), self._lane[host], self._tag)

    def start_receive(self, part: torch.Tensor, host: int) -> MPI.Request:
        """Start receiving a part from a host; an empty one is not sent."""
        if not part.numel():
            return MPI.REQUEST_NULL
        return self._comm.Irecv(as_raw_buffer(part), self._lane[host], self._tag)

    def room_for(self, part: torch.Tensor, number: int = 0) -> torch.Tensor:
        """Return scratch memory for a part; different memory for each number below `size`."""
        length = part.numel()
        return self._scratch[number * length : (number + 1) * length]

    def combine(self, part: torch.Tensor, arrived: Sequence[torch.Tensor]) -> None:
        """Reduce a part with what has arrived, in this order; 16-bit floats are rounded once."""
        wide = ACCUMULATION_DTYPES.get(part.dtype) if part.is_floating_point() else None
        total = part if wide is None or not arrived else part.to(wide)
        for each in arrived:
            self._op.combine(total, each, out=total)
        if total is not part:
            part.copy_(total)

    def finish(self, part: torch.Tensor) -> None:
        """For an average, divide the sum over all ranks."""
        self._op.divide_average(part, self._comm.size)
