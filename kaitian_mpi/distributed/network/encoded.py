"""The sum of gradients between hosts in a format of fewer bits than float32.

Among many hosts, as in `pairwise`, each sums up one part, which the others send to it, in float32,
and sends the sum to all. Two hosts send each other all they have: as many bytes, in half the
messages, and each value is rounded once. What the format rounds off stays in the sender's residual.
Every host takes what it sends as it arrives elsewhere, so the results are the same bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kaitian_mpi.distributed.network.exchanges import Crossing, Round
from kaitian_mpi.distributed.network.formats import WireFormat
from kaitian_mpi.distributed.network.residual import Residual


def allreduce(
    crossing: Crossing, parts: Sequence[torch.Tensor], residual: Residual, start: int
) -> Round:
    """Sum flat float32 parts over all hosts, in place; there are as many as hosts.

    They are of the residual's buffer, one after the other from `start` on.
    """
    starts = itertools.accumulate(map(len, parts[:-1]), initial=start)
    noted = []
    for part, at in zip(parts, starts, strict=True):
        residual.add_to(part, at)
        noted.append(residual.room(at, len(part)))
    exchange = _between_two if crossing.size == 2 else _among_many
    yield from exchange(crossing, parts, residual.wire, noted)


def _between_two(
    crossing: Crossing,
    parts: Sequence[torch.Tensor],
    wire: WireFormat,
    noted: Sequence[torch.Tensor],
) -> Round:
    [other] = crossing.others
    arrived = [_room(wire, part) for part in parts]
    requests = [crossing.start_receive(room, other) for room in arrived]
    leaving = [wire.encode(part, lost) for part, lost in zip(parts, noted, strict=True)]
    requests += [crossing.start_send(encoded, other) for encoded in leaving]
    yield requests
    for part, room in zip(parts, arrived, strict=True):
        part += _decoded(wire, room, part)


def _among_many(
    crossing: Crossing,
    parts: Sequence[torch.Tensor],
    wire: WireFormat,
    noted: Sequence[torch.Tensor],
) -> Round:
    own = parts[crossing.host]
    arrived = {host: _room(wire, own) for host in sorted(crossing.others)}
    requests = [crossing.start_receive(room, host) for host, room in arrived.items()]
    leaving = {host: wire.encode(parts[host], noted[host]) for host in crossing.others}
    requests += [crossing.start_send(encoded, host) for host, encoded in leaving.items()]
    yield requests  # MPI has sent what is leaving
    for room in arrived.values():
        own += _decoded(wire, room, own)
    encoded = wire.encode(own, noted[crossing.host])
    arrived = {host: _room(wire, parts[host]) for host in crossing.others}
    requests = [crossing.start_receive(room, host) for host, room in arrived.items()]
    requests += [crossing.start_send(encoded, host) for host in crossing.others]
    yield requests
    for host, room in arrived.items():
        wire.decode(room, parts[host])


def _room(wire: WireFormat, part: torch.Tensor) -> torch.Tensor:
    return torch.empty(wire.size(len(part)), dtype=torch.uint8)


def _decoded(wire: WireFormat, encoded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    values = torch.empty_like(like)
    wire.decode(encoded, values)
    return values
