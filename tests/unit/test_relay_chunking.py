"""How the relay's chunks are cut."""

import itertools

import pytest
import torch

from kaitian_mpi.relay.chunking import SIZES, Pace, half_performance_bytes, longest_chunk
from kaitian_mpi.relay.slots import COUNT, Slots

MB = 1 << 20


def stage(latency_sec, bytes_per_sec):
    return tuple(latency_sec + size / bytes_per_sec for size in SIZES)


@pytest.mark.parametrize("latency_sec", [5e-6, 5e-5, 1e-3])
@pytest.mark.parametrize("bytes_per_sec", [1e8, 2e9, 2e10])
@pytest.mark.parametrize("total", [1 * MB, 25 * MB, 64 * MB, 1 << 30])
def test_no_other_power_of_two_is_much_faster(latency_sec, bytes_per_sec, total):
    def seconds(chunk):
        return (-(-total // chunk) + 2) * (latency_sec + min(chunk, total) / bytes_per_sec)

    pace = Pace(half_performance_bytes(stage(latency_sec, bytes_per_sec)), 8 * MB)
    chosen = pace.chunk_bytes(total)
    best = min(seconds(64 << 10 << power) for power in range(8))
    assert seconds(chosen) <= 1.1 * best


def test_chunks_are_powers_of_two_within_the_memory():
    for half, total in itertools.product([1, 10_000, 10**9, 10**12], [0, 1, 999, 10**7, 10**11]):
        chunk = Pace(half, longest_chunk(32)).chunk_bytes(total)
        assert chunk & (chunk - 1) == 0
        assert 64 << 10 <= chunk <= 8 * MB


@pytest.mark.parametrize("memory_mb", [1, 3, 32, 1000])
def test_the_longest_chunks_fit_the_memory(memory_mb):
    assert memory_mb * MB / 2 < COUNT * longest_chunk(memory_mb) <= memory_mb * MB


@pytest.mark.parametrize("seconds", [(1e-3, 1e-3), (2e-3, 1e-3), (0.0, 0.0), (0.0, 1e-3)])
def test_measurements_under_a_passing_load_give_some_length(seconds):
    assert half_performance_bytes(seconds) >= 1


def test_buffers_grow_from_those_of_an_empty_chunk():
    slots = Slots(pins=False)
    chunk = torch.ones(3)
    for length in (0, 3, 1):
        assert slots.provide(1, chunk[:length].nbytes) == 1
        assert slots.take().view_as(chunk[:length]).shape == (length,)
    assert slots.allocated_bytes == 12
