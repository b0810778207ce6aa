import pytest
import torch
import torch.distributed as dist

from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.fixture(autouse=True, params=ALGORITHMS)
def algorithm(request, world):
    dist.group.WORLD.algorithm = request.param
    return request.param


def total(world):
    return world.size * (world.size + 1) // 2


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_all_reduce_sums_every_dtype(world, dtype):
    tensor = torch.full((3, 5), world.rank + 1, dtype=dtype)
    dist.all_reduce(tensor)
    assert tensor.dtype == dtype
    assert torch.equal(tensor, torch.full((3, 5), total(world), dtype=dtype))


@pytest.mark.parametrize("length", [10_007, 700_001])
def test_reduce_to_every_rank(world, length):
    for root in range(world.size):
        tensor = torch.arange(length, dtype=torch.float64) * (world.rank + 1)
        dist.reduce(tensor, root)
        times = total(world) if world.rank == root else world.rank + 1
        assert torch.equal(tensor, torch.arange(length, dtype=torch.float64) * times)


def test_all_reduce_of_a_strided_view_leaves_the_gaps_unchanged(world):
    whole = torch.full((12,), 100.0)
    view = whole[::2]
    view.fill_(world.rank + 1)
    dist.all_reduce(view)
    assert torch.equal(whole, torch.tensor([float(total(world)), 100.0] * 6))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.MIN, lambda n: 1.0),
        (dist.ReduceOp.MAX, lambda n: float(n)),
        (dist.ReduceOp.PRODUCT, lambda n: float(torch.arange(1, n + 1).prod())),
        (dist.ReduceOp.AVG, lambda n: (n + 1) / 2),
    ],
)
def test_all_reduce_operations(world, op, expected):
    tensor = torch.full((9,), float(world.rank + 1))
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, torch.full((9,), expected(world.size)))


def test_bitwise_reductions_and_booleans(world):
    bits = torch.full((4,), 1 << world.rank, dtype=torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.tolist() == [(1 << world.size) - 1] * 4
    flags = torch.tensor([world.rank == 0, True])
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    assert flags.tolist() == [world.size == 1, True]


@pytest.mark.parametrize("length", [5_000, 700_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
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


@pytest.mark.parametrize("length", [70, 200_001])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
def test_sums_of_narrow_integers_wrap_and_their_averages_are_exact(world, dtype, length):
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


def test_broadcast_from_every_rank(world):
    for root in range(world.size):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            tensor = torch.full((2, 3), world.rank == root).to(dtype)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, torch.ones(2, 3, dtype=dtype))


def test_object_collectives(world):
    gathered = [None] * world.size
    dist.all_gather_object(gathered, {"rank": world.rank, "text": "x" * (world.rank * 1000)})
    assert [item["rank"] for item in gathered] == list(range(world.size))
    assert len(gathered[-1]["text"]) == 1000 * (world.size - 1)
    objects = [{"from": world.rank}]
    dist.broadcast_object_list(objects, src=world.size - 1)
    assert objects == [{"from": world.size - 1}]


@pytest.mark.ranks(2)
def test_subgroups_in_any_order(world):
    members = [world.size - 1, 0]
    group = dist.new_group(members)
    others = dist.new_group([1])
    if world.rank in members:
        tensor = torch.full((3,), float(world.rank + 1))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(world.size + 1)] * 3
    if world.rank == 1:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=others)
        assert tensor.tolist() == [1.0] * 3
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_group_of_one_kind_has_no_relay(world):
    evens = list(range(0, world.size, 2))
    group = dist.new_group(evens)
    if world.rank in evens:
        assert group.has_one_group
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [len(evens)] * 5
    assert not dist.group.WORLD.has_one_group
