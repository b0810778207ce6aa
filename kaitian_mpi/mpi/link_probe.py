"""Which rank has a slow way to the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_RANKS = 256  # one link after the other is measured
_BYTES = 64 << 10
_REPEATS = 3
_SLOW_FACTOR = 2.0


def time_links(comm: MPI.Comm) -> list[float]:
    """Return the seconds that 64 KiB take there and back between rank i and rank i + 1.

    The last is between the last rank and rank 0. Of three times each, the least. Collective.
    """
    own, other = np.zeros(_BYTES, dtype=np.uint8), np.empty(_BYTES, dtype=np.uint8)
    mine = 0.0
    for link in range(comm.size):
        right = (link + 1) % comm.size
        if comm.rank not in (link, right):
            continue
        partner = right if comm.rank == link else link
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            comm.Sendrecv(own, partner, recvbuf=other, source=partner)
            times.append(time.perf_counter() - start)
        if comm.rank == link:
            mine = min(times)
    return list(gather_values(comm, mine))


def rank_with_slow_links(links: Sequence[float]) -> tuple[int, float] | None:
    """Return the rank both of whose links are slow, and how many times slower than usual.

    Args:
        links: as `time_links` returns them, of three ranks or more.

    Returns:
        None where no rank's faster link takes twice as long as that of the median rank.
    """
    faster = [min(link, links[rank - 1]) for rank, link in enumerate(links)]
    worst = max(faster)
    factor = worst / median(faster)
    return (faster.index(worst), factor) if factor >= _SLOW_FACTOR else None
