"""A ring of hosts: each receives from the one before it alone, and sends to the one after it.

Only neighbours exchange data, which suits switches that cannot carry all pairs at full speed. Every
part passes through all hosts twice: once to be summed up, once to be distributed. Source: Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI

from kaitian_mpi.distributed.network.crossing import Crossing


def allreduce(crossing: Crossing, parts: Sequence[torch.Tensor]) -> Iterator[Sequence[MPI.Request]]:
    """Reduce the parts over all hosts, in place; the sum of part h is complete on host h - 1."""
    host, size = crossing.host, crossing.size
    before, after = (host - 1) % size, (host + 1) % size
    sent = []
    for step in range(size - 1):
        part = parts[(host - step - 1) % size]
        arrived = crossing.room_for(part)
        received = crossing.start_receive(arrived, before)
        sent.append(crossing.start_send(parts[(host - step) % size], after))
        yield [received]
        crossing.combine(part, [arrived])
    crossing.finish(parts[after])
    yield sent  # what has been sent is overwritten now
    sent = []
    for step in range(size - 1):
        received = crossing.start_receive(parts[(host - step) % size], before)
        sent.append(crossing.start_send(parts[(after - step) % size], after))
        yield [received]
    yield sent
