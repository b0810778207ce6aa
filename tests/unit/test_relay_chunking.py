"""How the relay's chunks are cut."""

import pytest
import torch

from kaitian_mpi.distributed.relay.chunking import (
    COUNT,
    SIZES,
    ChunkLengths,
    half_performance_bytes,
    longest_chunk,
)
from kaitian_mpi.distributed.relay.relay import Slots

MB = 1 << 20


def stage(latency_sec, bytes_per_sec):
    return tuple(latency_sec + size / bytes_per_sec for size in SIZES)


def pipeline_sec(lengths, latency_sec, bytes_per_sec):
    """Return how long chunks take where the exchange has a latency and copies have none."""
    copied = exchanged = back = 0.0
    done = []
    for number, length in enumerate(lengths):
        took = length / bytes_per_sec
        copied = max(copied, done[number - COUNT] if number >= COUNT else 0.0) + took
        exchanged = max(copied, exchanged) + latency_sec + took
        back = max(exchanged, back) + took
        done.append(back)
    return back


@pytest.mark.parametrize("latency_sec", [5e-6, 5e-5, 1e-3])
@pytest.mark.parametrize("bytes_per_sec", [1e8, 2e9, 2e10])
@pytest.mark.parametrize("total", [1 * MB, 25 * MB, 64 * MB, 1 << 30])
def test_no_other_length_is_clearly_faster(latency_sec, bytes_per_sec, total):
    pace = ChunkLengths(half_performance_bytes(stage(latency_sec, bytes_per_sec)), 8 * MB)
    ours = pipeline_sec(pace.lengths(total), latency_sec, bytes_per_sec)
    sizes = [min(64 << 10 << power, total) for power in range(8)]
    best = min(
        pipeline_sec([size] * -(-total // size), latency_sec, bytes_per_sec) for size in sizes
    )
    assert ours <= 1.1 * best


def test_buffers_grow_from_those_of_an_empty_chunk():
    slots = Slots(pins=False)
    chunk = torch.ones(3)
    for length in (0, 3, 1):
        assert slots.provide(1, chunk[:length].nbytes) == 1
        assert slots.take().view_as(chunk[:length]).shape == (length,)
    assert slots.allocated_bytes == 12


@pytest.mark.parametrize("half", [1, 70_000, 500_000, 3 * MB, 10**9])
@pytest.mark.parametrize("memory_mb", [1, 3, 32, 1000])
def test_chunks_add_up_and_fit(half, memory_mb):
    longest = longest_chunk(memory_mb)
    assert memory_mb * MB / 2 < COUNT * longest <= memory_mb * MB
    for seconds in ((1e-3, 1e-3), (2e-3, 1e-3), (0.0, 0.0), (0.0, 1e-3)):  # under a passing load
        assert half_performance_bytes(seconds) >= 1
    pace = ChunkLengths(half, longest)
    for total in [0, 2, 99_998, 65_536, MB, 25 * MB + 6, 64 * MB, (1 << 30) + 8]:
        lengths = pace.lengths(total)
        assert sum(lengths) == total
        assert max(lengths) <= pace.limit_bytes
        assert not any(length % 64 for length in lengths[:-1])
        assert min(lengths) > 0 or lengths == [0]
