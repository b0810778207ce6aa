"""Collectives need at most one extra copy of a tensor, and none for contiguous host tensors."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.sizes(1, 3)

MB = 1 << 20
SIZE = 16 * MB
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


def calls(world, a, b):
    """Return calls by their names, on two tensors of as many elements."""
    pieces, others = (list(each.chunk(world.size)) for each in (a, b))
    of_root = pieces if world.rank == 0 else None
    return {
        "all_reduce": partial(dist.all_reduce, a),
        "average": partial(dist.all_reduce, a, dist.ReduceOp.AVG),
        "broadcast": partial(dist.broadcast, a, 0),
        "reduce": partial(dist.reduce, a, 0),
        "all_gather": partial(dist.all_gather, pieces, others[0]),
        "all_gather_single": partial(dist.all_gather_single, a, others[0]),
        "reduce_scatter": partial(dist.reduce_scatter, others[0], pieces),
        "reduce_scatter_single": partial(dist.reduce_scatter_single, others[0], a),
        "all_to_all": partial(dist.all_to_all, pieces, others),
        "all_to_all_single": partial(dist.all_to_all_single, a, b),
        "gather": partial(dist.gather, others[0], of_root),
        "scatter": partial(dist.scatter, others[0], of_root),
    }


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=str
)
def test_contiguous_tensors_are_not_copied_and_strided_ones_once(world, algorithm, dtype):
    rows = SIZE // dtype.itemsize // world.size * world.size
    a, b = torch.zeros(rows, dtype=dtype), torch.zeros(rows, dtype=dtype)
    for name, call in calls(world, a, b).items():
        assert taken(call) < SPARE, name
    a = torch.zeros(SIZE // dtype.itemsize, 2, dtype=dtype)[:, 0]
    for name in ("all_reduce", "broadcast", "reduce"):
        assert taken(calls(world, a, a)[name]) < SIZE + SPARE, name
