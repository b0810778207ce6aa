"""The sum of gradients between hosts in a format of fewer bits than float32.

As in `pairwise`, each host sums up one part, which the others send to it, in float32, and sends the
sum to all. Both messages are encoded, and what the format rounds off stays in the sender's
residual. Every host takes the decoded sum, the one that has computed it, too: so the results are
the same bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.network.crossing import Crossing
from kaitian_mpi.wire.residual import Residual


def allreduce(
    crossing: Crossing, parts: Sequence[torch.Tensor], residual: Residual, start: int
) -> Iterator[Sequence[MPI.Request]]:
    """Sum the parts over all hosts, in place; part h is summed on host h.

    Args:
        crossing: the messages.
        parts: flat, in float32.
        residual: of the buffer that the parts are of.
        start: where in it the first one begins; the others follow it.
    """
    wire, own = residual.wire, parts[crossing.host]
    starts = list(itertools.accumulate(map(len, parts[:-1]), initial=start))

    def encode(host: int) -> torch.Tensor:
        part = parts[host]
        encoded = wire.encode(part)
        residual.note(part - wire.decode(encoded, len(part)), starts[host])
        return encoded

    for part, at in zip(parts, starts, strict=True):
        residual.add_to(part, at)
    arrived = {host: _room(residual, own) for host in sorted(crossing.others)}
    requests = [crossing.start_receive(room, host) for host, room in arrived.items()]
    leaving = {host: encode(host) for host in crossing.others}  # kept until MPI has sent them
    requests += [crossing.start_send(encoded, host) for host, encoded in leaving.items()]
    yield requests
    for room in arrived.values():
        own += wire.decode(room, len(own))
    encoded = encode(crossing.host)
    own.copy_(wire.decode(encoded, len(own)))
    arrived = {host: _room(residual, parts[host]) for host in crossing.others}
    requests = [crossing.start_receive(room, host) for host, room in arrived.items()]
    requests += [crossing.start_send(encoded, host) for host in crossing.others]
    yield requests
    for host, room in arrived.items():
        parts[host].copy_(wire.decode(room, len(parts[host])))


def _room(residual: Residual, part: torch.Tensor) -> torch.Tensor:
    return torch.empty(residual.wire.size(len(part)), dtype=torch.uint8)
