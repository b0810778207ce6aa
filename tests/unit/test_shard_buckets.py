"""The memory of buckets of shards, which is used again."""

import pytest
import torch
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.distributed.shard_buckets import BufferPool, ShardBucket


def bucket_of(*sizes):
    parameters = {number: nn.Parameter(torch.ones(size)) for number, size in enumerate(sizes)}
    parts = [Part(number, 0, size, 0) for number, size in enumerate(sizes)]
    return ShardBucket(parameters, parts, size=1, rank=0)


@pytest.mark.parametrize("sizes", [[4], [3, 1]], ids=["one parameter", "two"])
@pytest.mark.parametrize("weight", [None, 0.0, 2.0])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_bucket_gives_back_the_buffers_that_it_takes(sizes, weight, has_gradient):
    pool, bucket = BufferPool(1), bucket_of(*sizes)
    pool.prepare([bucket_of(2, 2)])
    (free,) = pool._free.values()
    (prepared,) = free
    for _ in range(2):
        for parameter in bucket.parameters:
            parameter.grad = torch.ones_like(parameter) if has_gradient else None
        buffer = bucket.fill(weight, pool)
        assert buffer.tolist() == [(weight or 0.0) * has_gradient] * 4
        bucket.release(buffer, pool)
        assert len(free) == 1
        assert free[0] is prepared
