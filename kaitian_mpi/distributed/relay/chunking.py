"""The length of the relay's chunks: measured once per communicator, the same on all its ranks.

The exchange of n bytes takes a + n / B seconds, so N bytes in chunks of sqrt(N a B) bytes take the
least. The product a B is Hockney's half-performance length: at that n a stage reaches half of B.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
_MIN_CHUNK_BYTES = 64 << 10
_ALIGNMENT = 64  # a multiple of every dtype's size


class ChunkLengths(NamedTuple):
    """The lengths on which all ranks of a communicator have agreed."""

    half_bytes: int
    """The half-performance length of the slowest stage."""
    limit_bytes: int
    """The longest chunk."""

    def lengths(self, total_bytes: int) -> list[int]:
        """Return the lengths of the chunks of a tensor of so many bytes, which they add up to.

        All are equal, and multiples of 64 bytes, but for the last one.
        """
        best = max(math.isqrt(total_bytes * self.half_bytes), _MIN_CHUNK_BYTES)
        count = -(-total_bytes // min(best, max(self.limit_bytes, _MIN_CHUNK_BYTES)))
        each = -(-total_bytes // max(count, 1) // _ALIGNMENT) * _ALIGNMENT
        return [min(each, total_bytes - at) for at in range(0, total_bytes, each or 1)] or [0]


def half_performance_bytes(seconds: tuple[float, float]) -> int:
    """Return the half-performance length of a stage from its seconds for chunks of `SIZES`."""
    small, large = seconds
    if large <= small:
        return _FALLBACK_BYTES
    bytes_per_sec = (SIZES[1] - SIZES[0]) / (large - small)
    latency_sec = max(0.0, small - SIZES[0] / bytes_per_sec)
    return max(1, int(latency_sec * bytes_per_sec))


def longest_chunk(memory_mb: int) -> int:
    """Return the longest chunk of which enough fit in the relay's memory; a power of two."""
    return 2 ** int(math.log2((memory_mb << 20) // COUNT))


def agree_on_pace(
    comm: MPI.Comm, memory_mb: int, stages: Callable[[int], list[Callable[[], None]]]
) -> ChunkLengths:
    """Time the stages on each rank, and return what fits the slowest. Collective over `comm`.

    `stages` returns those for a chunk of so many bytes, each of which returns when it is done.
    Those that are collective must come in the same order on every rank.
    """
    slowest = [max(map(_seconds, stages(size))) for size in SIZES]
    small, large = map(max, zip(*gather_values(comm, slowest), strict=True))
    limits = gather_values(comm, longest_chunk(memory_mb))
    return ChunkLengths(half_performance_bytes((small, large)), min(limits))


def _seconds(stage: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        stage()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])  # what else the machine does only adds to it
