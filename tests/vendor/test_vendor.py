"""Ranks with a vendor's library together with ranks without one or of another vendor."""

import ctypes
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import collective_cases as cases
import fake_device
import fake_library
import pytest
import torch
import torch.distributed as dist
from batch_norms import check_any_split
from choices import by_default
from contracts import CONTRACTS, chosen_name
from fake_device import Stream, current_stream, on_device, values
from mpi_session import mostly_by_leader
from torch.nn.functional import layer_norm
from torch.nn.parallel import DistributedDataParallel
from uneven import by_hook, by_reducer, check_like_one_process, network
from worlds import mostly_in_one_kind, mostly_in_several_kinds

from kaitian_mpi.distributed.collectives import vendor_connection
from kaitian_mpi.distributed.data_parallel import _CountedSum, count_rows
from kaitian_mpi.distributed.gradients import sum_on_host
from kaitian_mpi.errors import CollectiveError, UnsupportedError
from kaitian_mpi.mpi.host_collectives import SHORT_BYTES
from kaitian_mpi.train.step import StepInProgress
from kaitian_mpi.train.step_times import StepClock

# The last four are not supported by the vendor: they are staged through host memory.
TYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.int16, torch.complex64, torch.uint16, torch.float8_e4m3fn),
)
SUMMED = TYPES[:7]


PLACES = "own device", "half of the ranks on the host"


@pytest.fixture(params=by_default(PLACES, ["own device"], ranks=(3, 4)))
def put(request, world):
    """A function that creates this rank's tensors from host tensors."""
    half = request.param != "own device" and world.rank % 2 == 0
    on_host = world.info.kind == "cpu" or half
    return (lambda tensor: tensor.clone()) if on_host else on_device


def test_the_vendors_library_is_used(world, device_of, algorithm):
    fake_library.calls.clear()
    dist.all_reduce(device_of(torch.ones(100_000)))
    alone = len(world.groups) == 1
    several = len(world.group.ranks) > 1 and algorithm != "flat"
    used = world.info.kind != "cpu" and (alone or several)
    assert bool(fake_library.calls) == used
    if alone:
        dist.broadcast(device_of(torch.ones(3)), 0)
        dist.all_reduce(device_of(torch.ones(3, dtype=torch.int16)))  # a type that it lacks
        dist.barrier()
        assert fake_library.calls == ["allreduce", "broadcast of 0"]


@mostly_by_leader(4)
def test_all_reduce(world, put, algorithm):
    for number, dtype in enumerate(SUMMED):
        for length in (0, 1, 3, 1_000) if number % 3 == 0 else (3, 1_000):
            cases.check_sum(world, put, dtype, length, in_background=length in (1, 1_000))
    for dtype in (torch.float16, torch.int64, torch.bool, torch.int16):
        cases.check_reduction_operations(world, put, dtype)
    for dtype in (torch.float32, torch.bfloat16):  # a mean is the same on every rank
        cases.check_average(world, put, dtype)


# Up to where one nonblocking call does it; from where it is cut, in pieces of 2 MB; and the
# rounds of 16-bit floats.
@mostly_by_leader()
@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize(
    ("dtype", "edge"),
    [(torch.float32, 16_384), (torch.float32, 2_097_152), (torch.bfloat16, 262_144)],
    ids=str,
)
def test_all_reduce_at_the_edges_of_chunks(world, device_of, algorithm, dtype, edge):
    edge *= world.size if dtype is torch.bfloat16 else 1
    cases.check_sum(world, device_of, dtype, edge, in_background=True)
    cases.check_sum(world, device_of, dtype, edge + 1, in_background=True)


@mostly_in_one_kind
@pytest.mark.thorough(4)  # of whose libraries 2 and 3 ranks have one each
@pytest.mark.parametrize("put", by_default(PLACES, ["own device"]), indirect=True)
def test_operations_that_move_data_and_reduce_it(world, put):
    for number, dtype in enumerate(TYPES):
        # Of seven types that the library supports in a row, and four that it does not, some have
        # each root; two have all.
        cases.check_moves(world, put, dtype, 7, [number % world.size])
    more = (torch.float32, 0), (torch.float32, 1), (torch.float32, 70_001), (torch.int16, 70_001)
    for dtype, length in more:
        cases.check_moves(world, put, dtype, length, range(world.size) if length > 1 else [0])
        cases.check_reductions(world, put, dtype, length)
    for dtype in SUMMED:
        cases.check_reductions(world, put, dtype, 7)
    cases.check_views_and_lists(world, put)
    cases.check_uneven_parts(world, put)


def test_sparse_sums_and_works_of_several_calls(world, device_of):
    tensors = [device_of(torch.full((length,), world.rank + 1.0)) for length in (3, 5)]
    work = dist.group.WORLD.allreduce(tensors)
    work.wait()
    for tensor in tensors:
        assert set(values(tensor).tolist()) == {float(cases.factor(world))}
    assert work.is_success()
    assert work.exception() is None
    indices = torch.tensor([[world.rank, world.size]])
    shape = (world.size + 1, 2)
    tensor = torch.sparse_coo_tensor(indices, torch.ones(2, 2), shape)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.to_dense()[:, 0].tolist() == [1.0] * world.size + [float(world.size)]


@mostly_in_several_kinds
@pytest.mark.thorough(4)
def test_torchs_own_functions_serve_our_groups_where_a_plug_in_replaced_them(
    world, device_of, monkeypatch
):
    """As importing torch_npu does, in two modules and by functions of other names."""
    served = []
    for name in ("gather", "gather_object", "batch_isend_irecv"):

        def _theirs(*args, name=name, **kwargs):
            served.append(name)

        for module in (dist, dist.distributed_c10d):
            monkeypatch.setattr(module, name, _theirs)
    group = dist.new_group()
    tensor = device_of(torch.tensor([world.rank + 1.0]))
    pieces = [torch.zeros_like(tensor) for _ in range(world.size)] if world.rank == 0 else None
    dist.gather(tensor, pieces, group=group)
    objects = [None] * world.size if world.rank == 0 else None
    dist.distributed_c10d.gather_object(world.rank, objects)
    if world.rank == 0:
        assert [values(piece).item() - 1 for piece in pieces] == objects == [*range(world.size)]
    received = torch.zeros_like(tensor)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    operations = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert values(received).item() == left + 1
    assert served == []
    with monkeypatch.context() as of_another_backend:
        of_another_backend.setattr(dist, "get_backend", lambda group: "hccl")
        dist.gather(tensor, pieces)
        dist.batch_isend_irecv(operations)
    assert served == ["gather", "batch_isend_irecv"]
    dist.destroy_process_group(group)


def test_groups_are_destroyed_in_any_order_and_leave_no_thread(world, device_of):
    """NCCL's own shutdown would wait for the other ranks, and its threads ask the store."""
    groups = [dist.new_group() for _ in range(2)]
    tensor = device_of(torch.full((9,), world.rank + 1.0))
    for group in groups:
        dist.all_reduce(tensor, group=group)
    work = dist.all_reduce(tensor, group=groups[0], async_op=True)
    for group in groups if world.rank else groups[::-1]:
        dist.destroy_process_group(group)
    work.wait()
    assert values(tensor).tolist() == [float(cases.factor(world) * world.size**2)] * 9
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    dist.all_reduce(tensor, group=alone)
    gathered = torch.zeros_like(tensor)
    dist.all_gather_single(gathered, tensor, group=alone)
    assert torch.equal(values(gathered), values(tensor))
    assert len(fake_library.communicators) <= 2  # of the default group, by kind and by host
    assert len(groups) == 2  # which are not what frees them


@pytest.mark.ranks(2)
def test_no_thread_of_the_library_can_end_the_survivors_of_a_loss(world, monkeypatch):
    """Each of its threads would: by the timeout, or when another rank asks for a dump."""
    if world.device_kind.is_host:
        pytest.skip("this rank has no such library")
    contract = CONTRACTS[chosen_name()]
    # Since torch 2.14, such a group of some ranks would give later ones other names elsewhere.
    names = dist.distributed_c10d._world
    monkeypatch.setattr(names, "group_count", names.group_count)  # so that it is restored
    for name in world.device_kind.error_handling():
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)

    def threads_of_a_group(*, survives):
        monkeypatch.setattr(vendor_connection, "ulfm", SimpleNamespace(is_enabled=lambda: survives))
        before = set(threading.enumerate())
        group = dist.new_group(sorted(world.group.ranks), use_local_synchronization=True)
        if world.rank == world.group.leader:
            time.sleep(0.1)  # the other ranks must not read what a group of this name has left
        dist.all_reduce(on_device(torch.ones(3)), group=group)
        names = [thread.name for thread in set(threading.enumerate()) - before]
        dist.destroy_process_group(group)
        return names.count(fake_library.THREAD)

    has_threads = bool(contract.handling_variable) and len(world.group.ranks) > 1
    assert bool(threads_of_a_group(survives=False)) == has_threads
    assert threads_of_a_group(survives=True) == 0


def test_unsupported_reductions_are_rejected_before_anything_is_sent(world, device_of):
    fake_library.calls.clear()
    for dtype in (torch.uint16, torch.float8_e4m3fn):
        tensor = device_of(torch.ones(world.size).to(dtype))
        for call, *arguments in (
            (dist.all_reduce, tensor),
            (dist.reduce, tensor, 0),
            (dist.reduce_scatter_single, tensor[:1], tensor),
            (dist.all_reduce, device_of(torch.ones(3)), dist.ReduceOp.BAND),
        ):
            with pytest.raises(UnsupportedError, match="not supported"):
                call(*arguments)
    assert fake_library.calls == []
    double, numbers = dist._make_nccl_premul_sum(2.0), device_of(torch.ones(2, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="PREMUL_SUM"):
        dist.all_reduce(numbers, double)
    tensor = device_of(torch.ones(3))
    dist.all_reduce(tensor)
    assert values(tensor).tolist() == [float(world.size)] * 3


def test_premul_sum_works_where_all_ranks_have_nccl(world, put):
    tensor, double = put(torch.full((5,), world.rank + 1.0)), dist._make_nccl_premul_sum(2.0)
    has_it = world.device_kind.vendor_supports(torch.float32, "PREMUL_SUM")
    if len(world.groups) > 1 or not has_it:
        with pytest.raises(UnsupportedError, match="PREMUL_SUM"):
            dist.all_reduce(tensor, double)
    else:
        dist.all_reduce(tensor, double)
        assert values(tensor).tolist() == [2.0 * cases.factor(world)] * 5


class Held:
    """Blocks a stream inside a `with`; by default the current one."""

    def __init__(self, stream=None):
        self._stream = stream

    def __enter__(self):
        self._go = threading.Event()
        (self._stream or current_stream()).give(lambda: fake_device.wait_until(self._go))

    def __exit__(self, *_):
        self._go.set()


@pytest.mark.parametrize("length", [3, 100_000])
def test_an_operation_runs_after_work_queued_on_the_callers_stream(
    world, device_of, algorithm, length
):
    with fake_device.stream(Stream()):
        tensor = device_of(torch.zeros(length))
        with Held():
            tensor.add_(world.rank + 1)
            work = dist.all_reduce(tensor, async_op=True)
            time.sleep(0.05)  # long enough to start if it did not wait
        work.wait()
        tensor.mul_(2)  # after it, on the caller's stream
        assert torch.equal(values(tensor), torch.full((length,), 2.0 * cases.factor(world)))


@pytest.mark.thorough(4)  # as each rank is alone
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("form", ["contiguous", "strided", "in host memory"])
def test_the_copies_of_a_group_of_one_rank_are_waited_for(world, device_of, form, in_background):
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    content = torch.arange(1.0, 1001.0)

    def placed(tensor):
        if form == "in host memory":
            return tensor.clone()
        if form == "contiguous":
            return device_of(tensor)
        return device_of(torch.stack([tensor, torch.zeros_like(tensor)], 1))[:, 0]

    def call(operation, output, tensor):
        options = {"group": alone, "async_op": in_background}
        if operation in (dist.all_reduce, dist.broadcast):
            if operation is dist.broadcast:
                options["src"] = world.rank
            return tensor, operation(tensor, **options)
        takes_lists = operation in (dist.all_to_all, dist.reduce_scatter, dist.scatter)
        inputs = [tensor] if takes_lists else tensor
        outputs = [output] if operation in (dist.all_to_all, dist.all_gather) else output
        return output, operation(outputs, inputs, **options)

    for operation in (
        *(dist.all_to_all, dist.all_to_all_single, dist.all_gather, dist.broadcast),
        *(dist.all_reduce, dist.reduce_scatter),
    ):
        output, tensor = placed(torch.zeros_like(content)), placed(content)
        if world.info.kind != "cpu":
            current_stream().give(lambda: time.sleep(0.01))
        output, work = call(operation, output, tensor)
        if work is not None:
            work.wait()
        assert torch.equal(values(output), content), operation.__name__
    dist.destroy_process_group(alone)


def test_the_host_sleeps_until_a_futures_result_is_complete(world, device_of, algorithm):
    fake_device.spins.clear()
    tensor = device_of(torch.full((100_000,), world.rank + 1.0))
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    found = doubled.wait()
    if world.info.kind != "cpu":
        world.device_kind.mark().wait()
    assert torch.equal(values(found), torch.full((100_000,), 2.0 * cases.factor(world)))
    assert fake_device.spins == []


def drop_memory_used_elsewhere(monkeypatch):
    """Drop a tensor that another stream was the last to use.

    Its memory is overwritten, and late, when it is allocated again.
    """

    def late(*arguments):
        time.sleep(0.05)
        return ctypes.memset(*arguments)

    monkeypatch.setattr(fake_device.memory, "ctypes", SimpleNamespace(memset=late))
    side, dropped = Stream(), on_device(torch.ones(8))
    with Held(side):
        dropped.record_stream(side)
        del dropped
    side.synchronize()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("make", [torch.nonzero, partial(layer_norm, normalized_shape=(8,))])
def test_what_the_host_computes_for_the_device_is_not_overwritten(make, monkeypatch):
    tensor = on_device(torch.arange(8.0))
    drop_memory_used_elsewhere(monkeypatch)
    assert torch.equal(values(make(tensor)), make(torch.arange(8.0)))


@pytest.mark.usefixtures("world")
def test_a_resized_tensor_keeps_its_content(monkeypatch):
    tensor = on_device(torch.arange(8.0))
    drop_memory_used_elsewhere(monkeypatch)
    tensor.resize_(64)  # which is as much memory, to the allocator, as the 8 that were dropped
    assert torch.equal(values(tensor)[:8], torch.arange(8.0))


def test_memory_is_kept_where_a_plug_in_lacks_record_stream(world, monkeypatch):
    if world.device_kind.is_host:
        pytest.skip("it has no streams")
    monkeypatch.setenv(fake_device.VARIABLE, "no-record-stream")
    side, dropped = Stream(), on_device(torch.full((7,), 3.0))
    content = fake_device.host_view(dropped)
    current_stream().synchronize()
    with Held(side):
        for _ in range(2):  # the second call begins when the stream has been given the first's
            world.device_kind.keep_until_done(dropped, side)
            dropped = on_device(torch.zeros(1))
        current_stream().synchronize()
        assert content.tolist() == [3.0] * 7
    side.synchronize()
    world.device_kind.keep_until_done(dropped, side)
    current_stream().synchronize()
    assert content.view(torch.uint8).tolist() == [fake_device.GARBAGE] * 28


@pytest.mark.ranks(2)
def test_a_receive_writes_after_work_queued_on_the_callers_stream(world, device_of):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    with fake_device.stream(Stream()):  # each thread has its own default stream
        received = device_of(torch.zeros(1_000))
        sent = dist.isend(device_of(torch.full((1_000,), world.rank + 1.0)), right)
        with Held():
            received.fill_(-1)  # stands for an earlier use of the same memory
            work = dist.irecv(received, left)
            dist.barrier()
        work.wait()
        sent.wait()
        assert torch.equal(values(received), torch.full((1_000,), left + 1.0))
        assert world.info.kind == "cpu" or fake_device.recorded_streams(received)


@pytest.mark.ranks(2)
def test_a_send_does_not_wait_for_the_device_and_keeps_its_place(world, device_of):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    later = torch.full((3,), 20.0)  # in host memory, and not to overtake
    content = device_of(torch.zeros(1_000))
    with Held():
        content.fill_(world.rank + 1.0)
        works = [dist.isend(content, right), dist.isend(later, right)]
        is_pending = not works[1].is_completed()
    assert is_pending or world.info.kind == "cpu"
    received = [device_of(torch.zeros(1_000)), torch.zeros(3)]
    for tensor in received:
        works.append(dist.irecv(tensor, left))
    for work in works:
        work.wait()
    assert torch.equal(values(received[0]), torch.full((1_000,), left + 1.0))
    assert received[1].tolist() == [20.0] * 3


@mostly_by_leader()
@pytest.mark.ranks(2)
def test_ranks_may_use_groups_in_different_orders(world, device_of, algorithm):
    if len(world.groups) == 1:
        pytest.skip("a vendor's own libraries need one order")
    groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        group.host.algorithm = algorithm
    order = groups if world.rank == 0 else groups[::-1]
    tensors = {group: device_of(torch.full((30_000,), world.rank + 1.0)) for group in groups}
    works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    for tensor in tensors.values():
        assert torch.equal(values(tensor), torch.full((30_000,), float(cases.factor(world))))
    for group in groups:
        dist.destroy_process_group(group)


def test_the_vendor_library_sees_all_groups_in_the_callers_order(world, put):
    if len(world.groups) > 1:
        pytest.skip("the library is used by the groups' workers")
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    fake_library.calls.clear()
    works, tensors = [], []
    for number in range(30):
        # Every third has a dtype that the library lacks and goes through host memory.
        dtype = torch.int16 if number % 3 == 2 else torch.int32
        tensors.append(put(torch.full((1 + number,), world.rank + 1, dtype=dtype)))
        works.append(dist.all_reduce(tensors[-1], group=groups[number % 2 + 1], async_op=True))
    called = list(fake_library.calls)
    assert called == ["allreduce"] * 20  # immediately, not when a worker gets to them
    for work in works:
        work.wait()
    for tensor in tensors:
        assert set(values(tensor).tolist()) == {cases.factor(world)}
    for group in groups[1:]:
        dist.destroy_process_group(group)


@mostly_by_leader(4)
@pytest.mark.parametrize("lacks", ["", "no-record-stream"])
def test_a_tensor_may_be_freed_before_it_is_sent(world, device_of, algorithm, lacks, monkeypatch):
    """And its memory may be reused by later work on the caller's stream."""
    monkeypatch.setenv(fake_device.VARIABLE, lacks)
    for length in (3, 40_000):
        total = device_of(torch.zeros(length * world.size))
        rank_values = device_of(torch.full((length,), world.rank + 1.0))
        summed = device_of(torch.full((length,), 1.0))
        with Held():
            works = [
                dist.all_reduce(summed, async_op=True),
                dist.all_gather_single(total, rank_values, async_op=True),
            ]
            del summed, rank_values
        for work in works:
            work.wait()
        # Work on another stream than the caller's must be recorded with the allocator.
        by_library = len(world.groups) == 1  # which may keep the tensor by its work instead
        may_not = world.info.kind == "cpu" or by_library or lacks
        assert may_not or fake_device.recorded_streams(total)
        expected = torch.arange(1.0, world.size + 1).repeat_interleave(length)
        assert torch.equal(values(total), expected)


@mostly_by_leader()
@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize(
    "way",
    [
        # As `test_ddp_has_the_gradient_of_the_whole_batch` of other groups of four ranks.
        pytest.param(by_hook, id="hook", marks=pytest.mark.thorough),
        pytest.param(by_reducer, id="reducer"),
        pytest.param(
            partial(by_reducer, bucket_caps=(1 << 20, 1 << 20)),
            id="one bucket",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_uneven_ranks_train_like_one_process(world, algorithm, way):
    check_like_one_process(world, way)


@mostly_by_leader(4)
def test_stock_ddp(world, algorithm):
    model = DistributedDataParallel(network().to(world.device))
    model(torch.full((2, 3, 8, 8), world.rank + 1.0).to(world.device)).sum().backward()
    for parameter in model.parameters():
        assert cases.agree(world, parameter.grad)


@mostly_in_several_kinds
@pytest.mark.sizes(2, 3)
def test_batch_norm_over_all_kinds_equals_one_process(world):
    check_any_split(world)


def test_a_steps_times_are_those_at_which_the_device_gets_there(world):
    if world.device_kind.is_host:
        pytest.skip("it has no streams")
    clock = StepClock(world.device_kind)
    with Held():
        clock.start()
        current_stream().give(lambda: time.sleep(0.06))  # computing, after which nothing is left
        clock.gradients_ready()
        current_stream().give(lambda: time.sleep(0.03))  # the sum
        clock.gradients_summed()
        clock.stop()
        assert clock.take().steps == 0
        begun_sec = time.perf_counter()  # the device has not even come to the first mark
    times = clock.take(wait=True)
    assert times.steps == 1
    assert times.computed >= 0.06
    assert times.waited >= 0.03
    assert times.computed + times.waited <= time.perf_counter() - begun_sec
    assert clock.take(wait=True).steps == 0


def test_the_fake_device_divides_unlike_the_host():
    """The tests above rely on this."""
    tensor = torch.arange(1.0, 1_000.0)
    assert not torch.equal(values(on_device(tensor).div_(3)), tensor / 3)
    quotient = values(on_device(tensor.double()).div_(0.7))
    torch.testing.assert_close(quotient, tensor.double() / 0.7, rtol=1e-15, atol=0.0)


def test_the_fake_devices_streams_run_asynchronously():
    """The tests above rely on this."""
    tensor = on_device(torch.zeros(3))
    side = Stream()
    with Held():
        tensor.fill_(5)
        with fake_device.stream(side):
            assert values(tensor).tolist() == [0.0] * 3
    assert values(tensor).tolist() == [5.0] * 3
    dropped = on_device(torch.zeros(3)).detach()
    content = fake_device.host_view(dropped)
    del dropped
    current_stream().synchronize()
    assert content.view(torch.uint8).tolist() == [fake_device.GARBAGE] * 12


def test_host_sums_do_not_wait_for_the_device(world, monkeypatch):
    """Weights are summed while the device is busy, whatever library connects the ranks."""
    if world.info.kind != "cpu":
        is_free, ended = threading.Event(), []
        current_stream().give(lambda: ended.append(is_free.wait(30)))
    total = torch.tensor(world.rank + 1.0)
    sum_on_host(total).wait()
    assert total.item() == sum(range(world.size + 1))
    if world.info.kind != "cpu":
        is_free.set()
        current_stream().synchronize()
        assert ended == [True]

    # Who sums a weight of a step does it this way.
    def refuse(tensor, *args, **kwargs):
        raise AssertionError(f"the library takes {tensor.dtype} to the device")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    weights = _CountedSum(None, count_rows)
    weights._samples = world.rank + 1
    weights._start_sum()
    step = StepInProgress(world.device_kind)
    task = SimpleNamespace(weight=len, weight_of=lambda batch, samples: world.rank + 1.0)
    step.begin(1, task, [SimpleNamespace(samples=1, batch=None)], [1] * world.size)
    weights._weigh()
    share = (world.rank + 1) / total.item()
    assert [weights.weight, step.weight_of_share()] == [share, share]


@pytest.mark.sizes(2, 3)
def test_no_thread_touches_another_device_than_the_ranks_own(world, device_of, algorithm):
    """It would get a context there, of about 0.5 GB: that of every rank, on the first device."""
    group = dist.new_group()
    fake_device.contexts.clear()
    for dtype in (torch.float32, torch.int16):  # one that the library lacks
        dist.all_reduce(device_of(torch.ones(9_000).to(dtype)), group=group, async_op=True).wait()
    total = torch.ones(1)
    sum_on_host(total, group).wait()
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    received = device_of(torch.zeros(9))
    works = [
        dist.irecv(received, left, group),
        dist.isend(device_of(torch.ones(9)), right, group),
    ]
    for work in works:
        work.wait()
    assert values(received).tolist() == [1.0] * 9
    dist.destroy_process_group(group)
    assert fake_device.contexts == (set() if world.info.kind == "cpu" else {world.device.index})


@mostly_in_several_kinds
@pytest.mark.sizes(2)
def test_a_rank_that_communicates_another_devices_tensors_warns_once(world, caplog):
    groups = [None, dist.new_group(backend="kaitian")]
    for group in groups * 2:
        dist.all_reduce(torch.ones(2), group=group)  # host memory is anybody's
    assert "which is not its device" not in caplog.text
    for group in groups:
        for elements in (2, SHORT_BYTES):  # a short one takes another path
            summed = on_device(torch.ones(elements))
            dist.all_reduce(summed, group=group)
            assert summed.cpu().eq(2).all()
        sent = on_device(torch.ones(2))
        dist.send(sent, 1, group) if world.rank == 0 else dist.recv(sent, 0, group)
    text = f"{world.info} communicates tensors on {fake_device.TYPE}:0, which is not its device"
    assert caplog.text.count(text) == world.device_kind.is_host
    dist.destroy_process_group(groups[1])


@pytest.mark.ranks(2)
def test_a_time_out_in_the_library_names_the_missing_rank(world, monkeypatch):
    """It ends the job: whoever waits for the device would compute with what is not there."""
    if len(world.groups) > 1 or not CONTRACTS[chosen_name()].ended_by:
        pytest.skip("ranks of several kinds meet in host memory first; some kernels have no end")
    said, codes = [], []
    monkeypatch.setattr(vendor_connection, "write_labeled", said.append)
    monkeypatch.setattr(vendor_connection, "abort_job", codes.append)
    group, last = dist.new_group(timeout=timedelta(seconds=1)), world.size - 1
    dist.all_reduce(on_device(torch.ones(3)), group=group)
    if world.rank != last:
        work = dist.all_reduce(on_device(torch.ones(3)), group=group, async_op=True)
        work.wait()
        current_stream().synchronize()  # lasts until the library is aborted
        waiting = f"waiting for rank {last} of {world.size}"
        advice = "set a longer timeout for the group if they are only slow"
        assert said == [f"timed out after 1 s in all_reduce #2: {waiting}; {advice}"]
        assert codes == [1]
        with pytest.raises(CollectiveError, match="timed out after 1 s in all_reduce #2"):
            dist.all_reduce(on_device(torch.ones(3)), group=group)
    total = torch.ones(1)
    sum_on_host(total).wait()  # no rank ends the group while others wait in it
    dist.destroy_process_group(group)
