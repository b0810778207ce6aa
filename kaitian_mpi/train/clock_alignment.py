"""Aligns the ranks' clocks with rank 0's, by messages that go back and forth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.observe.timeline.clock import AlignedClock, Offset, RoundTrip, estimate_offset
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import wait_request

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUND_TRIPS = 8


def align_clocks(
    comm: MPI.Comm, nodes: Sequence[int], clock: AlignedClock, now: Callable[[], float]
) -> None:
    """Align each rank's clock with the run's time, which rank 0 keeps. Collective.

    The first rank of each host asks rank 0, one after the other; then each answers the other ranks
    of its host, all hosts at once. Ranks that wait for their turn sleep.

    Args:
        comm: the ranks.
        nodes: the number of each rank's host.
        clock: this rank's clock; rank 0's is aligned already, and keeps its offset.
        now: reads this rank's clock, in seconds.
    """
    first_of = {node: nodes.index(node) for node in reversed(nodes)}
    first_of[nodes[0]] = 0
    own_first = first_of[nodes[comm.rank]]
    if comm.rank == 0:
        time = now()
        clock.align(time, Offset(clock.run_time(time) - time, 0.0))
        _answer(comm, sorted(set(first_of.values()) - {0}), clock, now)
    elif comm.rank == own_first:
        _ask(comm, 0, clock, now)
    if comm.rank != own_first:
        _ask(comm, own_first, clock, now)
    else:
        here = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
        _answer(comm, [rank for rank in here if rank != own_first], clock, now)


def _answer(
    comm: MPI.Comm, ranks: Sequence[int], clock: AlignedClock, now: Callable[[], float]
) -> None:
    """Answer each of these ranks in turn with the run's time."""
    for rank in ranks:
        _send(comm, rank, 0.0)  # it may ask now
        for _ in range(_ROUND_TRIPS):
            _receive(comm, rank)
            _send(comm, rank, clock.run_time(now()))
        _send(comm, rank, clock.error)


def _ask(comm: MPI.Comm, rank: int, clock: AlignedClock, now: Callable[[], float]) -> None:
    """Align the clock with another rank's."""
    _receive(comm, rank)
    trips = []
    for _ in range(_ROUND_TRIPS):
        sent = now()
        _send(comm, rank, 0.0)
        answered = _receive(comm, rank)
        trips.append(RoundTrip(sent, answered, now()))
    offset = estimate_offset(trips)
    clock.align(now(), Offset(offset.seconds, offset.error + _receive(comm, rank)))


def _send(comm: MPI.Comm, rank: int, value: float) -> None:
    wait_request(comm.Isend(np.array([value]), rank, tags.CLOCK))


def _receive(comm: MPI.Comm, rank: int) -> float:
    value = np.empty(1)
    wait_request(comm.Irecv(value, rank, tags.CLOCK))
    return float(value[0])
