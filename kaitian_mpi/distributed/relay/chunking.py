"""The length of the relay's chunks: measured once per communicator, the same on all its ranks.

N bytes in chunks of n bytes take N / n times the latency a of the slowest stage, its N / B, and the
n / C of the other stages for the first and the last chunk: the least where n is sqrt(N a C). The
product a C is near Hockney's half-performance length if all stages are equally fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

COUNT = 4
"""The number of chunks under way at once: one is copied out, one exchanged, one copied back, and
one is ready, so that a late copy does not stop the exchange."""

SIZES = 1 << 20, 4 << 20  # shorter ones stay in the cache, and so does the code between them
"""Bytes of the chunks that are timed."""
REPEATS = 4  # the first one warms up

_FALLBACK_BYTES = 256 << 10  # if a longer chunk took no longer, as under a passing load
_LEAST_LATENCY_SEC = 5e-5  # of the host's own part; a passing load may hide the rest
_MIN_CHUNK_BYTES = 64 << 10
ALIGNMENT = 64
"""In bytes: a multiple of every dtype's size."""


class ChunkLengths(NamedTuple):
    """The lengths on which all ranks of a communicator have agreed."""

    half_bytes: int
    """The latency of the slowest stage times the bandwidth of the others together."""
    limit_bytes: int
    """The longest chunk."""

    def lengths(self, total_bytes: int) -> list[int]:
        """Return the lengths of the chunks of a tensor of so many bytes, which they add up to.

        All are equal, and multiples of 64 bytes, but for the last one.
        """
        best = max(math.isqrt(total_bytes * self.half_bytes), _MIN_CHUNK_BYTES)
        least = -(-total_bytes // max(self.limit_bytes, _MIN_CHUNK_BYTES))
        count = max(least, round(total_bytes / best))
        length = math.ceil(total_bytes / (max(count, 1) * ALIGNMENT)) * ALIGNMENT
        return [min(length, total_bytes - at) for at in range(0, total_bytes, length or 1)] or [0]


def half_performance_bytes(seconds: Sequence[tuple[float, float]]) -> int:
    """Return the latency of the slowest stage, in bytes that the other stages move in that time.

    `seconds` are those of chunks of `SIZES`, by stage. A stage alone is its own other.
    """
    slowest = max(seconds, key=lambda stage: stage[1])
    per_byte = [max(0.0, large - small) / (SIZES[1] - SIZES[0]) for small, large in seconds]
    slowest_per_byte = per_byte[seconds.index(slowest)]
    others = sum(per_byte) - slowest_per_byte if len(seconds) > 1 else slowest_per_byte
    if slowest_per_byte <= 0.0 or others <= 0.0:
        return _FALLBACK_BYTES
    return max(1, int(max(_LEAST_LATENCY_SEC, slowest[0] - SIZES[0] * slowest_per_byte) / others))


def longest_chunk(memory_mb: int) -> int:
    """Return the longest chunk of which enough fit in the relay's memory; a power of two."""
    return 2 ** int(math.log2((memory_mb << 20) // COUNT))


def agree_on_limit(comm: MPI.Comm, memory_mb: int) -> int:
    """Return the longest chunk that fits every rank's memory. Collective over `comm`."""
    return min(gather_values(comm, longest_chunk(memory_mb)))


def agree_on_pace(
    comm: MPI.Comm, limit_bytes: int, stages: Callable[[int], list[Callable[[], None]]]
) -> ChunkLengths:
    """Time the stages on each rank, and return what fits the slowest. Collective over `comm`.

    `limit_bytes` is the longest chunk, the same on every rank.
    `stages` returns those for a chunk of so many bytes, each of which returns when it is done.
    Those that are collective must come in the same order on every rank.
    """
    small, large = ([_seconds(stage) for stage in stages(size)] for size in SIZES)
    # Ranks on the host have no copies.
    by_rank = gather_values(comm, [*zip(small, large, strict=True)])
    most = max(map(len, by_rank))
    slowest = [
        (max(s for s, _ in column), max(s for _, s in column))
        for column in zip(*(rank for rank in by_rank if len(rank) == most), strict=True)
    ]
    return ChunkLengths(half_performance_bytes(slowest), limit_bytes)


def _seconds(stage: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        stage()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])  # what else the machine does only adds to it
