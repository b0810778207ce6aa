"""One round between hosts: its messages, and how they reduce its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.distributed.network.formats import WireFormat
from kaitian_mpi.distributed.residual import Residual
from kaitian_mpi.mpi.datatypes import ACCUMULATION_DTYPES, Reduction, as_raw_buffer
from kaitian_mpi.mpi.pairwise import others

Parts = Sequence[torch.Tensor]
Round = Iterator[Sequence[MPI.Request]]
"""Does a part of its work between any two requests that it has to wait for."""


class Crossing:
    """The messages between one rank of each host, and the reduction of what they bring.

    Everything that crosses between hosts passes through `start_send` and `start_receive`.
    """

    def __init__(
        self, comm: MPI.Comm, lane: Sequence[int], tag: int, op: Reduction, scratch: torch.Tensor
    ) -> None:
        """Store the round's: `lane` has a rank of each host, `scratch` memory for all parts."""
        self._comm = comm
        self._lane = lane
        self._tag = tag
        self._op = op
        self._scratch = scratch
        self.host = lane.index(comm.rank)
        """The number of this rank's host."""
        self.size = len(lane)
        """The number of hosts."""
        self.others = others(self.host, self.size)
        """The other hosts, in the order in which to send to them."""

    def reduce_here(self, chunk: torch.Tensor, members: Sequence[int]) -> Round:
        """Reduce the chunks of this host's other ranks to this one's, in the order of ranks."""
        if not members:
            return
        arrived = self._scratch[: chunk.numel()]
        total = _wide(chunk)
        for rank in members:
            yield [self._comm.Irecv(as_raw_buffer(arrived), rank, self._tag)]
            self._op.combine(total, arrived, out=total)
        if total is not chunk:
            chunk.copy_(total)

    def start_send(self, part: torch.Tensor, host: int) -> MPI.Request:
        """Start sending a part to a host; an empty one is not sent."""
        if not part.numel():
            return MPI.REQUEST_NULL
        return self._comm.Isend(as_raw_buffer(part), self._lane[host], self._tag)

    def start_receive(self, part: torch.Tensor, host: int) -> MPI.Request:
        if not part.numel():
            return MPI.REQUEST_NULL
        return self._comm.Irecv(as_raw_buffer(part), self._lane[host], self._tag)

    def scratch_for(self, part: torch.Tensor, number: int = 0) -> torch.Tensor:
        """Return scratch memory for a part; different memory for each number below `size`."""
        length = part.numel()
        return self._scratch[number * length : (number + 1) * length]

    def combine(self, part: torch.Tensor, arrived: Parts) -> None:
        """Reduce a part with what has arrived, in this order; 16-bit floats are rounded once."""
        total = _wide(part) if arrived else part
        for addend in arrived:
            self._op.combine(total, addend, out=total)
        if total is not part:
            part.copy_(total)

    def divide_average(self, part: torch.Tensor) -> None:
        """For an average, divide the sum over all ranks."""
        self._op.divide_average(part, self._comm.size)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of 16-bit floats in the dtype in which they are summed."""
    wide = ACCUMULATION_DTYPES.get(tensor.dtype) if tensor.is_floating_point() else None
    return tensor if wide is None else tensor.to(wide)


def pairwise(crossing: Crossing, parts: Parts) -> Round:
    """Reduce the parts over all hosts, in place; part h is summed on host h.

    Two messages' latency for any number of hosts, and each part is rounded once. Each host sends to
    all others at once, so that the switches between them have to carry all pairs.
    """
    host_part = parts[crossing.host]
    arrived = [crossing.scratch_for(host_part, number) for number in range(crossing.size - 1)]
    received = [
        crossing.start_receive(buffer, host)
        for buffer, host in zip(arrived, crossing.others, strict=True)
    ]
    sent = [crossing.start_send(parts[host], host) for host in crossing.others]
    yield received
    crossing.combine(host_part, arrived)
    crossing.divide_average(host_part)
    yield sent  # what has been sent is overwritten now
    received = [crossing.start_receive(parts[host], host) for host in crossing.others]
    yield [*received, *[crossing.start_send(host_part, host) for host in crossing.others]]


def ring(crossing: Crossing, parts: Parts) -> Round:
    """Reduce the parts over all hosts, in place; the sum of part h is complete on host h - 1.

    Each host receives from the one before it and sends to the one after it, which suits switches
    that cannot carry all pairs at full speed (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009).
    """
    host = crossing.host
    size = crossing.size
    before = (host - 1) % size
    after = (host + 1) % size
    sent = []
    for step in range(size - 1):
        part = parts[(host - step - 1) % size]
        arrived = crossing.scratch_for(part)
        received = crossing.start_receive(arrived, before)
        sent.append(crossing.start_send(parts[(host - step) % size], after))
        yield [received]
        crossing.combine(part, [arrived])
    crossing.divide_average(parts[after])
    yield sent  # what has been sent is overwritten now
    sent = []
    for step in range(size - 1):
        received = crossing.start_receive(parts[(host - step) % size], before)
        sent.append(crossing.start_send(parts[(after - step) % size], after))
        yield [received]
    yield sent


Exchange = Callable[[Crossing, Parts], Round]

EXCHANGES: dict[str, Exchange] = {"pairwise": pairwise, "ring": ring}
"""The exchanges between hosts, by name. Each is bandwidth-optimal: with H hosts, 2 (H - 1) / H of
the bytes leave and enter each."""


def encoded(crossing: Crossing, parts: Parts, residual: Residual, start: int) -> Round:
    """Sum flat float32 parts over all hosts, in place, in the residual's format.

    They are of the residual's buffer, one after the other from `start` on, as many as hosts. Among
    many hosts, as in `pairwise`, each sums up one part in float32 and sends the sum to all. Two
    hosts send each other all they have: as many bytes, in half the messages, and each value is
    rounded once. What the format rounds off stays in the sender's residual. Every host takes what
    it sends as it arrives elsewhere, so the results are the same bit by bit.
    """
    starts = itertools.accumulate(map(len, parts[:-1]), initial=start)
    noted = []
    for part, at in zip(parts, starts, strict=True):
        residual.add_to(part, at)
        noted.append(residual.lost_part(at, len(part)))
    exchange = _between_two if crossing.size == 2 else _among_many
    yield from exchange(crossing, parts, residual.wire, noted)


def _between_two(crossing: Crossing, parts: Parts, wire: WireFormat, noted: Parts) -> Round:
    [other] = crossing.others
    arrived = [_encoded_buffer(wire, part) for part in parts]
    requests = [crossing.start_receive(buffer, other) for buffer in arrived]
    leaving = [wire.encode(part, lost) for part, lost in zip(parts, noted, strict=True)]
    requests += [crossing.start_send(encoded, other) for encoded in leaving]
    yield requests
    for part, buffer in zip(parts, arrived, strict=True):
        part += _decoded(wire, buffer, part)


def _among_many(crossing: Crossing, parts: Parts, wire: WireFormat, noted: Parts) -> Round:
    host_part = parts[crossing.host]
    arrived = {host: _encoded_buffer(wire, host_part) for host in sorted(crossing.others)}
    requests = [crossing.start_receive(buffer, host) for host, buffer in arrived.items()]
    leaving = {host: wire.encode(parts[host], noted[host]) for host in crossing.others}
    requests += [crossing.start_send(encoded, host) for host, encoded in leaving.items()]
    yield requests  # MPI has sent what is leaving
    for buffer in arrived.values():
        host_part += _decoded(wire, buffer, host_part)
    encoded = wire.encode(host_part, noted[crossing.host])
    arrived = {host: _encoded_buffer(wire, parts[host]) for host in crossing.others}
    requests = [crossing.start_receive(buffer, host) for host, buffer in arrived.items()]
    requests += [crossing.start_send(encoded, host) for host in crossing.others]
    yield requests
    for host, buffer in arrived.items():
        wire.decode(buffer, parts[host])


def _encoded_buffer(wire: WireFormat, part: torch.Tensor) -> torch.Tensor:
    return torch.empty(wire.size(len(part)), dtype=torch.uint8)


def _decoded(wire: WireFormat, encoded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    values = torch.empty_like(like)
    wire.decode(encoded, values)
    return values
