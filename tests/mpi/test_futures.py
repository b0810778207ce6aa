"""Futures of asynchronous collectives: the order of their callbacks, and how errors arrive."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi import data_parallel

# torch's own warning about a future whose callback failed.
pytestmark = pytest.mark.filterwarnings("ignore")


def filled(value, length=10):
    return torch.full((length,), float(value))


@pytest.mark.parametrize("in_background", [True, False], ids=["async", "sync"])
def test_collectives_from_a_callback_run_after_earlier_ones(world, in_background):
    """Also if the future is already complete on some ranks when the callback is attached."""
    for _ in range(20):
        first, second, third, last = filled(1), filled(10, 2_000), filled(100, 2_000), filled(5)
        work = dist.all_reduce(first, async_op=True)
        between = dist.all_reduce(second, async_op=True)
        if world.rank == 0:
            between.wait()

        def reduce_third(_, third=third):
            nested = dist.all_reduce(third, async_op=in_background)
            return nested.get_future().wait()[0] if in_background else third

        result = work.get_future().then(reduce_third)
        dist.all_reduce(last)
        assert result.wait() is third
        between.wait()
        sums = [tensor.unique().tolist() for tensor in (first, second, third, last)]
        assert sums == [[value * world.size] for value in (1, 10, 100, 5)]


def with_bare_hook(model, process_group):
    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()

    wrapped = DistributedDataParallel(model, process_group=process_group)
    wrapped.register_comm_hook(process_group, hook)
    return wrapped


@pytest.mark.sizes(3)
def test_backward_raises_if_a_rank_does_not_arrive(world, last):
    """It neither ends the job nor crashes in DDP's reducer."""
    for wrap in (DistributedDataParallel, with_bare_hook, data_parallel):
        group = dist.new_group()  # which may take longer than the timeout
        group.set_timeout(timedelta(seconds=0.5))
        name = "group" if wrap is data_parallel else "process_group"
        model = wrap(torch.nn.Linear(3, 2), **{name: group})
        if world.rank != last:
            with pytest.raises(RuntimeError, match=r"(?i)timed out after"):
                model(torch.ones(1, 3)).sum().backward()
        dist.barrier()
        dist.destroy_process_group(group)
