"""Collectives need at most one extra copy of a tensor, and none for contiguous host tensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.sizes(1, 3)

MB = 1 << 20
SIZE = 32 * MB
# A few megabytes of scratch, MPI's own buffers, and Python's allocations.
SPARE = 8 * MB


def in_memory():
    """Return this process's memory and its peak since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return tuple(int(values[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


def taken(call):
    """Return a call's peak memory beyond that before it, in bytes."""
    call()  # for what the first call allocates permanently
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, _ = in_memory()
    call()
    return in_memory()[1] - before


def parts(tensor, world):
    return list(tensor.chunk(world.size))


CALLS = {
    "all_reduce": lambda a, b, world: dist.all_reduce(a),
    "average": lambda a, b, world: dist.all_reduce(a, dist.ReduceOp.AVG),
    "broadcast": lambda a, b, world: dist.broadcast(a, 0),
    "reduce": lambda a, b, world: dist.reduce(a, 0),
    "all_gather": lambda a, b, world: dist.all_gather(parts(a, world), b[: len(b) // world.size]),
    "all_gather_single": lambda a, b, world: dist.all_gather_single(a, b[: len(b) // world.size]),
    "reduce_scatter": lambda a, b, world: dist.reduce_scatter(
        b[: len(b) // world.size], parts(a, world)
    ),
    "reduce_scatter_single": lambda a, b, world: dist.reduce_scatter_single(
        b[: len(b) // world.size], a
    ),
    "all_to_all": lambda a, b, world: dist.all_to_all(parts(a, world), parts(b, world)),
    "all_to_all_single": lambda a, b, world: dist.all_to_all_single(a, b),
    "gather": lambda a, b, world: dist.gather(
        b[: len(b) // world.size], parts(a, world) if world.rank == 0 else None
    ),
    "scatter": lambda a, b, world: dist.scatter(
        b[: len(b) // world.size], parts(a, world) if world.rank == 0 else None
    ),
}


# One rank alone has nothing to split into stripes.
@pytest.fixture(autouse=True, params=["flat", pytest.param("striped", marks=pytest.mark.sizes(3))])
def algorithm(request, world):
    dist.group.WORLD.algorithm = request.param
    yield
    dist.group.WORLD.algorithm = "flat"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_contiguous_tensors_are_not_copied(world, name, dtype):
    rows = SIZE // dtype.itemsize // world.size * world.size
    a, b = torch.zeros(rows, dtype=dtype), torch.zeros(rows, dtype=dtype)
    assert taken(lambda: CALLS[name](a, b, world)) < SPARE


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce"])
def test_a_strided_tensor_needs_one_copy(world, name):
    a = torch.zeros(SIZE // 4, 2)[:, 0]
    assert taken(lambda: CALLS[name](a, a, world)) < SIZE + SPARE
