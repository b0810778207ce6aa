"""Finds the host whose network links are slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

# With two hosts either may be the slow one; links are measured one after the other.
MIN_HOSTS, MAX_HOSTS = 3, 256
_BYTES = 256 << 10
_REPEATS = 8
_SLOW_FACTOR = 2.0


def time_links(comm: MPI.Comm, ends: Sequence[int]) -> list[float]:
    """Time the link from each of some ranks to the next, in a ring. Collective.

    Args:
        comm: the ranks.
        ends: the ranks in the ring, such as one per host.

    Returns:
        Seconds to exchange 256 KiB in both directions at once, the shortest of eight times, by
        link; the last link is from the last rank to the first.
    """
    own, other = np.zeros(_BYTES, dtype=np.uint8), np.empty(_BYTES, dtype=np.uint8)
    own_times: dict[int, float] = {}
    for link, left in enumerate(ends):
        right = ends[(link + 1) % len(ends)]
        if comm.rank not in (left, right):
            continue
        partner = right if comm.rank == left else left
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            comm.Sendrecv(own, partner, recvbuf=other, source=partner)
            times.append(time.perf_counter() - start)
        if comm.rank == left:
            own_times[link] = min(times)
    times_by_link = {
        int(link): sec
        for by_rank in gather_values(comm, own_times)
        for link, sec in by_rank.items()
    }
    return [times_by_link[link] for link in range(len(ends))]


def end_with_slow_links(links: Sequence[float]) -> tuple[int, float] | None:
    """Return the index of the rank with two slow links, and how many times slower they are.

    Args:
        links: the result of `time_links` for three ranks or more.

    Returns:
        None if no rank's faster link takes at least twice as long as the median rank's.
    """
    faster = [min(link, links[end - 1]) for end, link in enumerate(links)]
    worst = max(faster)
    factor = worst / median(faster)
    return (faster.index(worst), factor) if factor >= _SLOW_FACTOR else None
