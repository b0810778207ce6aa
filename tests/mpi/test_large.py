"""Tensors of more elements than a C int can count. Only run on request: see below."""

import os
from functools import cache, partial

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


@cache  # not made by those who only collect the tests
def ascending():
    return (torch.arange(_CHUNK + _PERIOD) % _PERIOD).to(torch.uint8)


def values(seed, start):
    """Return a chunk of the infinite sequence of numbers of `seed`, from `start` on."""
    first = (start + 7 * seed) % _PERIOD
    return ascending()[first : first + _CHUNK]


def fill(tensor, seed):
    for number, chunk in enumerate(tensor.split(_CHUNK)):
        chunk.copy_(values(seed, number * _CHUNK)[: len(chunk)])
    return tensor


def empty(length):
    return torch.zeros(length, dtype=torch.uint8)


def holds(tensor, *seeds, start=0):
    """Return whether a tensor is the sum of these sequences from `start` on."""
    return all(
        torch.equal(chunk, sum(values(seed, start + n * _CHUNK) for seed in seeds)[: len(chunk)])
        for n, chunk in enumerate(tensor.split(_CHUNK))
    )


def hold(pieces, start=0):
    """Return whether each of the ranks' pieces is of that rank's sequence, from `start` on."""
    return all(holds(piece, rank, start=start) for rank, piece in enumerate(pieces))


def test_one_tensor(world):
    rank, tensor = world.rank, empty(LARGE)
    for call, of_ranks in (
        (dist.all_reduce, [(0, 1), (0, 1)]),
        (partial(dist.reduce, dst=1), [(0,), (0, 1)]),
        (partial(dist.broadcast, src=1), [(1,), (1,)]),
        (partial(dist.send, dst=0) if rank else partial(dist.recv, src=1), [(1,), (1,)]),
    ):
        fill(tensor, rank)
        call(tensor)
        assert holds(tensor, *of_ranks[rank]), call


@pytest.mark.parametrize("lengths", [(HALF, HALF), (LARGE, LARGE), (LARGE, 8), (8, LARGE)])
def test_pieces_of_two_ranks(world, lengths):
    own = fill(empty(lengths[world.rank]), world.rank)
    pieces = [empty(length) for length in lengths]
    dist.all_gather(pieces, own)
    assert hold(pieces)
    if lengths[0] != lengths[1]:
        return
    del pieces
    whole = empty(sum(lengths))
    dist.all_gather_single(whole, own)
    pieces = list(whole.split(lengths[0]))
    assert hold(pieces)
    whole.zero_()
    dist.gather(own, pieces if world.rank == 1 else None, dst=1)
    assert world.rank == 0 or hold(pieces)
    own.zero_()
    dist.scatter(own, pieces if world.rank == 1 else None, src=1)
    assert holds(own, world.rank)


def test_parts_for_both_ranks(world):
    own, received, start = fill(empty(LARGE), world.rank), empty(LARGE), world.rank * HALF
    parts, to_the_other = list(received.split(HALF)), [0, LARGE][:: 1 - 2 * world.rank]
    dist.reduce_scatter_single(parts[0], own)
    assert holds(parts[0], 0, 1, start=start)
    for call, *arguments in (
        (dist.all_to_all_single, received, own),
        (dist.all_to_all, parts, list(own.split(HALF))),
    ):
        received.zero_()
        call(*arguments)
        assert hold(parts, start)
    dist.all_to_all_single(received, own, to_the_other, to_the_other)
    assert holds(received, 1 - world.rank)
