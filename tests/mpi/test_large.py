"""Tensors of more elements than a C int can count. Only run on request: see below."""

import os

import psutil
import pytest
import torch
import torch.distributed as dist

from kaitian_mpi.mpi.exchange import gather_values

LARGE = 2**31 + 8
HALF = LARGE // 2
NEEDED_GB = 16

pytestmark = pytest.mark.skipif(
    os.environ.get("KAITIAN_TEST_LARGE") != "1",
    reason=f"takes minutes and {NEEDED_GB} GB of memory: set KAITIAN_TEST_LARGE=1",
)


@pytest.fixture(autouse=True)
def _room(world):
    if world.size != 2:
        pytest.skip("needs 2 ranks, for whose tensors there is memory")
    # Agreed between ranks, as the free memory changes from one rank's query to the next one's.
    free_gb = min(gather_values(world.comm, psutil.virtual_memory().available)) / 1e9
    if free_gb < NEEDED_GB:
        pytest.skip(f"needs {NEEDED_GB} GB of free memory, found {free_gb:.1f}")


# A prime period, so that what has moved by a power of two is not where it should be; sums of two
# stay below 256.
_PERIOD = 113
_CHUNK = _PERIOD << 17
_ASCENDING = (torch.arange(_CHUNK + _PERIOD) % _PERIOD).to(torch.uint8)


def values(seed, start):
    """Return a chunk of the infinite sequence of numbers of `seed`, from `start` on."""
    first = (start + 7 * seed) % _PERIOD
    return _ASCENDING[first : first + _CHUNK]


def filled(length, seed):
    tensor = torch.empty(length, dtype=torch.uint8)
    for start, chunk in chunks(tensor):
        chunk.copy_(values(seed, start)[: len(chunk)])
    return tensor


def empty(length):
    return torch.zeros(length, dtype=torch.uint8)


def chunks(tensor):
    return zip(range(0, len(tensor), _CHUNK), tensor.split(_CHUNK), strict=True)


def holds(tensor, *seeds, start=0):
    """Return whether a tensor is the sum of these sequences from `start` on."""
    return all(
        torch.equal(chunk, sum(values(seed, start + at) for seed in seeds)[: len(chunk)])
        for at, chunk in chunks(tensor)
    )


def test_the_check_detects_a_shift_and_a_single_wrong_element():
    tensor = filled(3 * _CHUNK + 5, seed=1)
    assert holds(tensor, 1)
    assert not holds(tensor, 0)
    assert not holds(tensor[1 << 20 :], 1)
    assert holds(tensor[1 << 20 :], 1, start=1 << 20)
    tensor[-1] += 1
    assert not holds(tensor, 1)


def test_all_reduce(world):
    tensor = filled(LARGE, world.rank)
    dist.all_reduce(tensor)
    assert holds(tensor, 0, 1)


def test_reduce(world):
    tensor = filled(LARGE, world.rank)
    dist.reduce(tensor, 1)
    assert holds(tensor, *((0, 1) if world.rank == 1 else (0,)))


def test_broadcast(world):
    tensor = filled(LARGE, 3) if world.rank == 1 else empty(LARGE)
    dist.broadcast(tensor, 1)
    assert holds(tensor, 3)


@pytest.mark.parametrize("part", [HALF, LARGE])
def test_all_gather_into_tensor(world, part):
    whole = empty(2 * part)
    dist.all_gather_into_tensor(whole, filled(part, world.rank))
    assert holds(whole[:part], 0)
    assert holds(whole[part:], 1)


@pytest.mark.parametrize("lengths", [(HALF, HALF), (LARGE, 8), (8, LARGE)])
def test_all_gather(world, lengths):
    pieces = [empty(length) for length in lengths]
    dist.all_gather(pieces, filled(lengths[world.rank], world.rank))
    assert holds(pieces[0], 0)
    assert holds(pieces[1], 1)


@pytest.mark.parametrize("part", [HALF, LARGE])
def test_gather(world, part):
    pieces = [empty(part), empty(part)] if world.rank == 1 else None
    dist.gather(filled(part, world.rank), pieces, dst=1)
    if pieces is not None:
        assert holds(pieces[0], 0)
        assert holds(pieces[1], 1)


@pytest.mark.parametrize("part", [HALF, LARGE])
def test_scatter(world, part):
    pieces = [filled(part, 0), filled(part, 1)] if world.rank == 1 else None
    tensor = empty(part)
    dist.scatter(tensor, pieces, src=1)
    assert holds(tensor, world.rank)


def test_reduce_scatter_tensor(world):
    tensor = empty(HALF)
    dist.reduce_scatter_tensor(tensor, filled(LARGE, world.rank))
    assert holds(tensor, 0, 1, start=world.rank * HALF)


def test_all_to_all_single_of_equal_parts(world):
    received = empty(LARGE)
    dist.all_to_all_single(received, filled(LARGE, world.rank))
    assert holds(received[:HALF], 0, start=world.rank * HALF)
    assert holds(received[HALF:], 1, start=world.rank * HALF)


def test_all_to_all_single_with_everything_to_one_rank(world):
    received = empty(LARGE)
    parts = [0, LARGE] if world.rank == 0 else [LARGE, 0]
    dist.all_to_all_single(received, filled(LARGE, world.rank), parts, parts)
    assert holds(received, 1 - world.rank)


def test_all_to_all(world):
    sent = [filled(HALF, 2 * world.rank), filled(HALF, 2 * world.rank + 1)]
    received = [empty(HALF), empty(HALF)]
    dist.all_to_all(received, sent)
    assert holds(received[0], world.rank)
    assert holds(received[1], 2 + world.rank)


def test_send_and_recv(world):
    tensor = filled(LARGE, 3) if world.rank == 1 else empty(LARGE)
    if world.rank == 1:
        dist.send(tensor, 0)
    else:
        dist.recv(tensor, 1)
    assert holds(tensor, 3)
