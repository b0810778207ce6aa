"""Which host has a slow way to the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

FEWEST, MOST = 3, 256  # of two ends either may be slow; links are measured one after the other
_BYTES = 256 << 10
_REPEATS = 8
_SLOW_FACTOR = 2.0


def time_links(comm: MPI.Comm, ends: Sequence[int]) -> list[float]:
    """Return the seconds that 256 KiB take both ways at once between each end and the next.

    The last is between the last end and the first. Of eight times each, the least. Collective.

    Args:
        comm: the ranks.
        ends: some of them, one of each host, say.
    """
    own, other = np.zeros(_BYTES, dtype=np.uint8), np.empty(_BYTES, dtype=np.uint8)
    mine: dict[int, float] = {}
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
            mine[link] = min(times)
    times_of = {
        int(link): sec for of_rank in gather_values(comm, mine) for link, sec in of_rank.items()
    }
    return [times_of[link] for link in range(len(ends))]


def end_with_slow_links(links: Sequence[float]) -> tuple[int, float] | None:
    """Return the end both of whose links are slow, and how many times slower than usual.

    Args:
        links: as `time_links` returns them, of three ends or more.

    Returns:
        None where no end's faster link takes twice as long as that of the median end.
    """
    faster = [min(link, links[end - 1]) for end, link in enumerate(links)]
    worst = max(faster)
    factor = worst / median(faster)
    return (faster.index(worst), factor) if factor >= _SLOW_FACTOR else None
