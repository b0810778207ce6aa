"""Every operation, on host tensors and on a fake accelerator's, between ranks of two kinds."""

from contextlib import nullcontext, suppress

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
from choices import by_default
from mpi4py import MPI

from kaitian_mpi.errors import CollectiveError, UnsupportedError
from kaitian_mpi.mpi import host_collectives, pairwise

fake_device = pytest.importorskip("vendor.fake_device", exc_type=ImportError)  # needs a compiler
on_device = fake_device.on_device

# With three ranks, one kind has a single one, as each has with two; with four, each has two.
pytestmark = pytest.mark.sizes(1, 3, 4)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)


@pytest.fixture(scope="module", autouse=True)
def accelerator():
    """A device without streams, for which every path must copy to the host and back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fake_device.VARIABLE, "-Stream")
        library = fake_device.install()
    # Else torch.distributed.checkpoint uses its streams.
    torch.get_device_module(fake_device.TYPE).is_available = lambda: False
    return library


@pytest.fixture(
    params=[
        pytest.param("host", marks=pytest.mark.thorough(2, 4)),
        pytest.param("accelerator", marks=pytest.mark.thorough),
        pytest.param("one kind each", marks=pytest.mark.thorough(1)),  # which is the host
    ]
)
def place(request, world):
    """A function that creates this rank's tensors."""
    on_host = {"host": True, "accelerator": False, "one kind each": world.info.kind == "even"}
    return torch.clone if on_host[request.param] else on_device


@pytest.mark.sizes(1, 2, 3, 4)
def test_sums(world, place, algorithm):
    for dtype in FLOATS + INTEGERS:
        cases.check_sum(world, place, dtype, 15)
    cases.check_views_and_lists(world, place)
    for dtype in (torch.float32, torch.uint8):
        cases.check_reduction_operations(world, place, dtype)
    cases.check_average(world, place, torch.float32)
    bits = place(torch.full((4,), 1 << world.rank, dtype=torch.int32))
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert cases.values(bits).tolist() == [(1 << world.size) - 1] * 4
    flags = place(torch.tensor([world.rank == 0, True]))
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    assert cases.values(flags).tolist() == [world.size == 1, True]


@pytest.mark.thorough(1, 4)
@pytest.mark.parametrize(
    "dtype", by_default([torch.float32, torch.bfloat16, torch.int64], [torch.bfloat16]), ids=str
)
def test_what_the_host_cannot_touch_is_copied_there_and_back(world, algorithm, dtype, monkeypatch):
    copied, engine, copy = [], fake_device.CopyEngine, fake_device.CopyEngine.copy
    monkeypatch.setattr(engine, "copy", lambda *a: copied.append(a[1].numel()) or copy(*a))
    for length in (1, 1_000, 3_000_001):
        copied.clear()
        cases.check_sum(world, on_device, dtype, length)
        assert world.size == 1 or sum(copied) >= 2 * length


@pytest.mark.thorough(4)
def test_moves_and_reductions(world, place):
    for number, dtype in enumerate(MOVED):
        roots = range(world.size) if dtype is torch.float32 else [number % world.size]
        cases.check_moves(world, place, dtype, 7, roots)
    for dtype in FLOATS + INTEGERS:
        cases.check_reductions(world, place, dtype, 6)
    for length in (0, 1):
        cases.check_moves(world, place, torch.float32, length, [0])
        cases.check_reductions(world, place, torch.float32, length)
    cases.check_uneven_parts(world, place)
    pieces = [place(torch.full((rank + 1,), float(world.rank + 1))) for rank in range(world.size)]
    output = place(torch.zeros(world.rank + 1))
    dist.reduce_scatter(output, pieces, op=dist.ReduceOp.AVG)
    cases.check([output], [torch.full((world.rank + 1,), cases.factor(world) / world.size)])


@pytest.mark.parametrize("length", by_default([10_007, 700_001], [10_007]))
def test_long_reductions(world, algorithm, length):
    cases.check_reductions(world, torch.clone, torch.float64, length)


@pytest.mark.thorough(4)
@pytest.mark.parametrize("length", [5_000, 700_001])
@pytest.mark.parametrize(
    "dtype", by_default([torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str
)
def test_sixteen_bit_floats_are_summed_in_float32_and_rounded_once_a_stage(
    world, algorithm, dtype, length
):
    generator = torch.Generator().manual_seed(1)
    terms = torch.randn(world.size, length, generator=generator).to(dtype)
    tensor = terms[world.rank].clone()
    dist.all_reduce(tensor)
    # The groups' sums are rounded before they are exchanged; flat has one stage only.
    ranks = [list(range(world.size))] if algorithm == "flat" else [g.ranks for g in world.groups]
    stages = torch.stack([terms[list(r)].float().sum(0).to(dtype) for r in ranks])
    exact = stages.double().sum(0)
    # At most half a unit in the last place away from the exact sum of the exchanged values.
    spacing = torch.finfo(dtype).eps * exact.abs()
    assert ((tensor.double() - exact).abs() <= 0.5001 * spacing + 1e-6).all()


@pytest.mark.thorough(1, 4)
@pytest.mark.parametrize("length", [70, 200_001])
@pytest.mark.parametrize(
    "dtype", by_default([torch.int8, torch.uint8, torch.int16], [torch.int8, torch.int16]), ids=str
)
def test_sums_of_narrow_integers_wrap_and_their_averages_are_exact(world, algorithm, dtype, length):
    largest = torch.iinfo(dtype).max
    term = torch.full((length,), largest - 1, dtype=dtype)
    wrapped = (term.long() * world.size).to(dtype)
    for op, expected in ((dist.ReduceOp.SUM, wrapped), (dist.ReduceOp.AVG, term)):
        tensor = term.clone()
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, expected)
        tensor = term.clone()
        dist.reduce(tensor, 0, op)
        assert torch.equal(tensor, expected if world.rank == 0 else term)
        part = torch.zeros(length, dtype=dtype)
        dist.reduce_scatter_single(part, term.repeat(world.size), op)
        assert torch.equal(part, expected)
    product = term.clone()
    dist.all_reduce(product, dist.ReduceOp.PRODUCT)
    assert torch.equal(product, (term.long() ** world.size).to(dtype))


@pytest.mark.thorough(1, 2, 4)
@pytest.mark.sizes(1, 2, 3, 4)
def test_results_may_be_written_over_what_is_sent(world, place):
    """As ZeRO and FSDP reduce gradients, in the way of each of the sizes that differ in it."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for kib in (1, 80, 256, 500, 700):
            part = (kib << 10) // (world.size * dtype.itemsize)
            for number in range(3):  # memory that was free at first is in use later
                content = torch.arange(part * world.size) % 5 + number
                tensor = place((content * (world.rank + 1)).to(dtype))
                rank_part = slice(world.rank * part, (world.rank + 1) * part)
                dist.reduce_scatter_single(tensor[rank_part], tensor)
                expected = (content * cases.factor(world)).to(dtype)
                assert torch.equal(cases.values(tensor[rank_part]), expected[rank_part]), (
                    dtype,
                    kib,
                )
    for length in (3, 50_000):
        sent = torch.arange(world.size) + world.size * world.rank
        received = torch.arange(world.size) * world.size + world.rank
        whole = place(sent.repeat_interleave(length))
        dist.all_to_all_single(whole, whole)
        assert torch.equal(cases.values(whole), received.repeat_interleave(length))
        whole = place(sent.repeat_interleave(length))
        dist.all_to_all(list(whole.split(length)), list(whole.split(length)))
        assert torch.equal(cases.values(whole), received.repeat_interleave(length))
        # A rank's own piece goes to where that of another rank was.
        sent_parts = list(place(sent.repeat_interleave(length)).split(length))
        parts = [torch.empty_like(part) for part in sent_parts]
        parts[world.rank] = sent_parts[(world.rank + 1) % world.size]
        dist.all_to_all(parts, sent_parts)
        whole = torch.cat([cases.values(part) for part in parts])
        assert torch.equal(whole, received.repeat_interleave(length))


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="came with torch 2.14")
def test_gather_into_one_tensor(world, place):
    rank_tensor = place(torch.full((2, 3), float(world.rank)))
    expected = torch.arange(float(world.size)).repeat_interleave(6)
    for root in range(world.size):
        for shape in ((world.size * 2, 3), (world.size * 6,)):
            whole = place(torch.zeros(shape)) if world.rank == root else None
            dist.gather_single(rank_tensor, whole, dst=root)
            if whole is not None:
                assert torch.equal(cases.values(whole), expected.reshape(shape))
    if world.rank == world.size - 1:
        with pytest.raises(UnsupportedError, match="has 7 elements"):
            dist.gather_single(rank_tensor, place(torch.zeros(7)), dst=world.rank)


def test_all_to_all_single_of_more_than_mpi_can_count(world, place, monkeypatch):
    """The other ranks, whose part is small, do not know that it is."""
    if world.rank == 0:
        monkeypatch.setattr(host_collectives, "MAX_COUNT", 16)
    sent_counts = [(world.rank + target) % 3 for target in range(world.size)]
    received_counts = [(world.rank + source) % 3 for source in range(world.size)]
    tensor = place(
        torch.arange(sum(sent_counts) * 5, dtype=torch.uint8).view(-1, 5) + 50 * world.rank
    )
    output = place(torch.zeros(sum(received_counts), 5, dtype=torch.uint8))
    for in_background in (False, True):
        work = dist.all_to_all_single(
            output, tensor, received_counts, sent_counts, async_op=in_background
        )
        if in_background:
            work.wait()
        pieces = cases.values(output).split(received_counts)
        for source, piece in enumerate(pieces):
            start = 5 * sum((source + target) % 3 for target in range(world.rank))
            expected = torch.arange(start, start + piece.numel(), dtype=torch.uint8) + 50 * source
            assert torch.equal(piece.reshape(-1), expected)


@pytest.mark.ranks(2)
def test_messages_by_tag_out_of_order_and_from_any_source(world, place):
    last = world.size - 1
    if world.rank == 0:
        first, second = place(torch.zeros(5)), place(torch.zeros(70_000))
        works = [dist.irecv(second, last, tag=2), dist.irecv(first, last, tag=1)]
        for work in works:
            work.wait()
        assert cases.values(first).tolist() == [1.0] * 5
        assert cases.values(second).sum().item() == 140_000.0
        got = place(torch.zeros(1))
        assert dist.recv(got, tag=3) == last
        assert cases.values(got).item() == 3.0
    elif world.rank == last:
        dist.send(place(torch.ones(5)), 0, tag=1)
        dist.send(place(torch.full((70_000,), 2.0)), 0, tag=2)
        dist.send(place(torch.full((1,), 3.0)), 0, tag=3)


@pytest.mark.ranks(3)
def test_a_receive_from_any_source_leaves_the_messages_that_others_wait_for(world, last):
    """Though both have one tag; rank 1 sends after the other message has come."""
    if world.rank == 0:
        first, second, third = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        awaited = dist.irecv(first, 1)
        assert dist.recv(second) == last
        dist.send(torch.ones(1), 1)
        awaited.wait()
        assert dist.recv(third) == 1
        assert [first.item(), second.item(), third.item()] == [10.0, float(last), 11.0]
    elif world.rank == 1:
        dist.recv(torch.zeros(1), 0)
        for number in (10.0, 11.0):
            dist.send(torch.full((1,), number), 0)
    elif world.rank == last:
        dist.send(torch.full((1,), float(last)), 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [5, 9, 100_000, 3_000_000])
def test_a_longer_message_than_the_tensor_leaves_the_memory_after_it(world, length):
    """Open MPI would write all of it; a message of 9 bytes might announce pieces."""
    group = dist.new_group([0, 1])
    if world.rank == 0:
        dist.send(torch.ones(length, dtype=torch.uint8), 1, group=group)
    if world.rank == 1:
        whole = torch.zeros(1 << 20, dtype=torch.uint8)
        with pytest.raises(
            CollectiveError, match="different sizes; give both ranks tensors of one"
        ):
            dist.recv(whole[:4], 0, group=group)
        assert not whole[4:].any()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batched", [False, True], ids=["recv", "batch_isend_irecv"])
@pytest.mark.parametrize("length", [0, 7, 9, 70_000])
def test_a_shorter_message_than_the_tensor_is_refused(world, length, batched):
    """The rest of the tensor would keep its old numbers."""
    group = dist.new_group([0, 1])
    tensor = torch.ones(length + world.rank, dtype=torch.uint8)
    if world.rank == 0:
        dist.send(tensor, 1, group=group)
    if world.rank == 1:
        receive = dist.P2POp(dist.irecv, tensor, 0, group)
        (work,) = dist.batch_isend_irecv([receive]) if batched else [dist.irecv(tensor, 0, group)]
        with pytest.raises(CollectiveError, match="different sizes; give both ranks tensors of"):
            work.wait()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_pending_receive_does_not_block_a_collective(world):
    peer = (world.rank + 1) % world.size
    source = (world.rank - 1) % world.size
    received = torch.zeros(3)
    work = dist.irecv(received, source)
    dist.all_reduce(torch.ones(3))
    assert not work.is_completed()
    dist.barrier()
    dist.send(torch.full((3,), float(world.rank)), peer)
    work.wait()
    assert received.tolist() == [float(source)] * 3


def test_mismatched_arguments_are_rejected_before_anything_is_sent(world):
    n = world.size
    for call, *arguments in (
        (dist.all_gather, [torch.zeros(2)] * (n + 1), torch.zeros(2)),
        (dist.reduce_scatter_single, torch.zeros(2), torch.zeros(2 * n + 1)),
        (dist.all_to_all_single, torch.zeros(n), torch.zeros(n), [5] * n, [1] * n),
    ):
        with pytest.raises((UnsupportedError, ValueError)):
            call(*arguments)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == n


def test_a_rank_that_gets_more_than_it_expects_says_so(world):
    rank_tensor = torch.ones(12 if world.rank == 0 else 4)
    received = [torch.empty_like(rank_tensor) for _ in range(world.size)]
    is_error = (
        pytest.raises(CollectiveError, match="different sizes") if world.rank else nullcontext()
    )
    with is_error:
        pairwise.exchange(world.comm.Dup(), [rank_tensor] * world.size, received)


LONG_ONLY = ("all_reduce", "all_gather", "all_gather_single")  # shorter ones are refused by MPI


@pytest.mark.thorough(1, 4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("longer", ["rank 0", "others"])
@pytest.mark.parametrize(
    "kind",
    ["broadcast", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all", *LONG_ONLY],
)
def test_tensors_of_unlike_sizes_are_refused_and_the_memory_after_them_is_left(world, kind, longer):
    """MPI takes less than there is room for, and Open MPI writes more than that."""
    size, last = world.size, world.size - 1
    for shorter in (3 << 20,) if kind in LONG_ONLY else (20, 70_000, 3 << 20):
        group = dist.new_group()  # an error ends it
        length = shorter + 10 * ((world.rank == 0) == (longer == "rank 0"))
        whole = torch.zeros((size + 1) * length, dtype=torch.uint8)
        pieces = list(whole[:-length].split(length))
        ones = torch.ones(length, dtype=torch.uint8)
        target = pieces[-1]
        inputs = [ones] * size
        call, *arguments = {
            "broadcast": (dist.broadcast, target, last),
            "reduce": (dist.reduce, target, 0),
            "gather": (dist.gather, ones, pieces if world.rank == 0 else None),
            "scatter": (dist.scatter, target, inputs if world.rank == last else None, last),
            "reduce_scatter": (dist.reduce_scatter, target, inputs),
            "all_to_all": (dist.all_to_all, pieces, inputs),
            "all_reduce": (dist.all_reduce, target),
            "all_gather": (dist.all_gather, pieces, ones),
            "all_gather_single": (dist.all_gather_single, whole[:-length], ones),
        }[kind]
        # The root of a short broadcast waits for nobody, so only the ranks of other sizes know, or
        # with MPICH all.
        is_short = kind == "broadcast" and shorter == 20
        expected = pytest.raises(CollectiveError, match="different sizes")
        if is_short and world.rank != 0:
            expected = (
                suppress(CollectiveError) if "MPICH" in MPI.Get_library_version() else nullcontext()
            )
        with expected:
            call(*arguments, group=group)
        assert not whole[-length:].any()
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sent", "promised"),
    [(3, 2), (3, 4), (3, 0), (0, 3), (20_000, 5), (100_000, 20_000), (20_000, 100_000)],
)
def test_different_splits_are_refused_and_the_memory_after_them_is_left(world, sent, promised):
    """Rank 0 sends so many numbers to each other rank, which expect as many as they are promised.

    Open MPI would write all of them; it does not fail on the rank that sends them.
    """
    others = world.size - 1
    received = [3 if world.rank == 0 else promised, *[3] * others]
    splits = [3, *[sent if world.rank == 0 else 3] * others]
    whole = torch.zeros(sum(received) + 100_000)
    output = whole[: sum(received)]
    group = dist.new_group()
    is_refused = (
        pytest.raises(CollectiveError, match="different sizes") if world.rank else nullcontext()
    )
    with is_refused:
        dist.all_to_all_single(output, torch.ones(sum(splits)), received, splits, group)
    assert not whole[len(output) :].any()
    if world.rank == 0:
        assert output.all()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_subgroups_in_any_order_have_a_relay_if_they_are_of_two_kinds(world):
    assert not dist.group.WORLD.has_one_group
    for members in ([world.size - 1, 0], [1], list(range(0, world.size, 2))):
        group = dist.new_group(members)
        if world.rank in members:
            assert group.has_one_group == (len({world.infos[rank].kind for rank in members}) == 1)
            tensor = torch.full((3,), float(world.rank + 1))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [sum(rank + 1.0 for rank in members)] * 3
    dist.barrier()
