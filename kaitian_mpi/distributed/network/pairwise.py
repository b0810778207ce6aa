"""Pairwise exchange between hosts: each host sums up one part, which the others send to it.

Two messages' latency whatever the number of hosts, and each part is rounded once. Each host sends
to all others at once, so that the switches between them have to carry all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.distributed.network.crossing import Crossing


def allreduce(crossing: Crossing, parts: Sequence[torch.Tensor]) -> Iterator[Sequence[MPI.Request]]:
    """Reduce the parts over all hosts, in place; part h is summed on host h."""
    own = parts[crossing.host]
    arrived = [crossing.room_for(own, number) for number in range(crossing.size - 1)]
    received = [
        crossing.start_receive(room, host)
        for room, host in zip(arrived, crossing.others, strict=True)
    ]
    sent = [crossing.start_send(parts[host], host) for host in crossing.others]
    yield received
    crossing.combine(own, arrived)
    crossing.finish(own)
    yield sent  # what has been sent is overwritten now
    received = [crossing.start_receive(parts[host], host) for host in crossing.others]
    yield [*received, *[crossing.start_send(own, host) for host in crossing.others]]
