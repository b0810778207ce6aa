"""How long the relay's chunks are: measured once per communicator, the same on all its ranks.

A stage (copy out, exchange, copy back) takes a + n / B seconds for n bytes. The pipeline over N
bytes in chunks of c takes (N / c + 2) (a + c / B) for the slowest stage: short chunks pay a often,
with long ones the pipeline is filled and drained for long. The best c is sqrt(N a B / 2). The
product a B is Hockney's half-performance length: the n at which a stage reaches half of B.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kaitian_mpi.relay.slots import COUNT

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = 64 << 10, 2 << 20
"""Bytes of the chunks that are timed."""
REPEATS = 4  # the first one warms up

_FALLBACK_BYTES = 256 << 10  # where a longer chunk took no longer, as under a passing load
_MIN_CHUNK_BYTES = 64 << 10


class Pace(NamedTuple):
    """What all ranks of a communicator have agreed on."""

    half_bytes: int
    """The half-performance length of the slowest stage."""
    limit_bytes: int
    """The longest chunk."""

    def chunk_bytes(self, total_bytes: int) -> int:
        """Return the length of the chunks of a tensor of so many bytes; a power of two."""
        best = math.sqrt(max(1, total_bytes * self.half_bytes) / 2)
        least, most = _MIN_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, self.limit_bytes)
        return int(min(max(2 ** round(math.log2(best)), least), most))


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


def agree_on_longest_chunk(comm: MPI.Comm, memory_mb: int) -> int:
    """Return the longest chunk for which every rank has the memory. Collective over `comm`."""
    from mpi4py import MPI

    agreed = np.array([longest_chunk(memory_mb)])
    comm.Allreduce(MPI.IN_PLACE, agreed, MPI.MIN)
    return int(agreed[0])


def agree_on_pace(
    comm: MPI.Comm, memory_mb: int, stages: Callable[[int], list[Callable[[], None]]]
) -> Pace:
    """Time the stages on each rank, and return what fits the slowest. Collective over `comm`.

    Args:
        comm: the ranks that exchange the chunks.
        memory_mb: what this rank's buffers may take together.
        stages: returns the stages for a chunk of so many bytes, each of which returns when it is
            done. Those that are collective must come in the same order on every rank.
    """
    from mpi4py import MPI

    slowest = [max(map(_seconds, stages(size))) for size in SIZES]
    agreed = np.array([*slowest, -longest_chunk(memory_mb)])
    comm.Allreduce(MPI.IN_PLACE, agreed, MPI.MAX)
    small, large, limit = agreed.tolist()
    return Pace(half_performance_bytes((small, large)), -int(limit))


def _seconds(stage: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        stage()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])  # what else the machine does only adds to it
