"""What callers see: timeouts, mismatches, profiles, works and futures, rejected arguments."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from kaitian_mpi import data_parallel
from kaitian_mpi.errors import CollectiveError, UnsupportedError


@pytest.mark.sizes(2, 3)
def test_work_state(world, last):
    tensor, token = torch.ones(4), torch.zeros(1)
    if world.rank == last:
        for rank in range(last):
            dist.recv(token, rank)  # which they send after their timeout
        dist.all_reduce(tensor)
        return
    work = dist.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    assert not work.is_success()
    with pytest.raises(
        CollectiveError, match=r"^Timed out after 0\.1 s in wait\(\): all_reduce goes on, and"
    ):
        work.wait(timedelta(seconds=0.1))
    dist.send(token, last)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert work.get_future().value()[0].tolist() == [float(world.size)] * 4


@pytest.mark.sizes(1, 3)
def test_thousands_in_flight_complete_in_order(world):
    tensors = [torch.full((1 + number % 7,), float(number)) for number in range(2_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, work in enumerate(works):
        work.wait()
        assert tensors[number][0].item() == number * world.size


@pytest.mark.sizes(1, 3)
@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_profiles_name_the_operations(world, in_background):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work = dist.all_reduce(torch.ones(2), async_op=in_background)
        if in_background:
            work.wait()
        dist.broadcast(torch.ones(2), 0)
        dist.all_gather([torch.ones(2) for _ in range(world.size)], torch.ones(2))
        dist.reduce(torch.ones(2), 0)
        dist.barrier()
    expected = ("all_reduce", "broadcast", "all_gather", "reduce", "barrier")
    assert {event.name for event in seen.events()} >= {f"kaitian:{name}" for name in expected}


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, dist.ReduceOp.BAND), (torch.bfloat16, dist.ReduceOp.BXOR),
        (torch.complex64, dist.ReduceOp.MAX), (torch.float32, dist._make_nccl_premul_sum(2.0)),
        (torch.uint16, dist.ReduceOp.SUM), (torch.bool, dist.ReduceOp.AVG),
        (torch.float8_e4m3fn, dist.ReduceOp.SUM),
    ],
    ids=str,
)  # fmt: skip
def test_undefined_reductions_are_rejected(world, dtype, op):
    tensor = torch.ones(world.size).to(dtype)
    for call in (
        lambda: dist.all_reduce(tensor, op),
        lambda: dist.reduce(tensor, 0, op),
        lambda: dist.reduce_scatter_single(tensor[:1].clone(), tensor, op),
        lambda: dist.reduce_scatter(tensor[:1].clone(), list(tensor.split(1)), op),
    ):
        with pytest.raises((UnsupportedError, ValueError), match="not support"):
            call()


def test_tensors_that_require_grad_are_accepted(world):
    tensor = torch.full((4,), float(world.rank + 1), requires_grad=True)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size * (world.size + 1) / 2] * 4
    assert tensor.requires_grad
    assert tensor.is_leaf
    dist.broadcast(tensor, 0)
    if world.size > 1:
        work = dist.isend(tensor, (world.rank + 1) % world.size)
        received = torch.zeros(4, requires_grad=True)
        dist.recv(received, (world.rank - 1) % world.size)
        assert received.tolist() == tensor.tolist()
        work.wait()


@pytest.mark.thorough(2, 4)
@pytest.mark.parametrize("mode_outside", [True, False])
def test_inference_tensors(world, mode_outside):
    """Also if another thread or code outside the mode writes to them."""
    with torch.inference_mode():
        strided = [torch.zeros(4, 2)[:, 0].fill_(1.0) for _ in range(2)]
        narrow = torch.ones(300_000, dtype=torch.bfloat16)
        whole, part = torch.ones(200_000 * world.size), torch.zeros(200_000)
        pieces = [torch.zeros(300_000) for _ in range(world.size)]
        ring = torch.zeros(4, 2)[:, 1]
        average = torch.full((3,), float(world.rank + 1))
    with torch.inference_mode(mode_outside):
        for in_background in (True, False):
            works = [
                dist.all_reduce(strided[in_background], async_op=in_background),
                dist.all_reduce(narrow, async_op=in_background),
                dist.all_reduce(average, dist.ReduceOp.AVG, async_op=in_background),
                dist.reduce_scatter_single(part, whole, async_op=in_background),
                dist.all_gather(pieces, pieces[0].new_ones(300_000), async_op=in_background),
            ]
            if in_background:
                for work in works:
                    work.wait()
        if world.size > 1:  # torch lets no rank send to itself
            received = dist.irecv(ring, (world.rank - 1) % world.size)
            dist.send(torch.ones(4), (world.rank + 1) % world.size)
            received.wait()
    assert [tensor.tolist() for tensor in strided] == [[float(world.size)] * 4] * 2
    assert narrow.unique().tolist() == [float(world.size) ** 2]
    assert average.tolist() == [(world.size + 1) / 2] * 3
    assert part.unique().tolist() == [float(world.size)]
    assert all(piece.unique().tolist() == [1.0] for piece in pieces)
    assert ring.tolist() == [float(world.size > 1)] * 4


def test_meta_tensors_are_accepted(world):
    assert dist.all_reduce(torch.ones(4, device="meta")) is None


def test_a_negative_view_is_resolved(world):
    tensor = torch.full((2,), complex(0, world.rank)).conj().imag
    assert tensor.is_neg()
    pieces = [torch.zeros(2) for _ in range(world.size)]
    dist.all_gather(pieces, tensor)
    assert [piece[0].item() for piece in pieces] == [-float(rank) for rank in range(world.size)]
    dist.all_reduce(tensor)
    assert tensor.tolist() == [-float(sum(range(world.size)))] * 2


def filled(value, length=10):
    return torch.full((length,), float(value))


@pytest.mark.thorough(2, 4)
@pytest.mark.filterwarnings("ignore")  # torch's own, of a future whose callback failed
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


@pytest.mark.filterwarnings("ignore")
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
