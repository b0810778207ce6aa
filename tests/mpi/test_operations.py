"""Every operation, on host tensors and on a fake accelerator's, between ranks of two kinds."""

import fake_accelerator
import pytest
import torch
import torch.distributed as dist
from fake_accelerator import on_device, values

from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.mpi import host_collectives

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


@pytest.fixture(autouse=True)
def accelerator():
    fake_accelerator.install()


@pytest.fixture(params=["host", "accelerator", "one kind each"])
def place(request, world):
    """A function that creates this rank's tensors."""
    on_host = request.param == "host" or (
        request.param == "one kind each" and world.info.kind == "even"
    )
    return (lambda tensor: tensor.clone()) if on_host else on_device


def ranks_sum(world):
    return world.size * (world.size + 1) // 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_to_every_root(world, place, dtype):
    for root in range(world.size):
        tensor = place(torch.full((2, 3), world.rank + 1, dtype=dtype))
        dist.reduce(tensor, root)
        expected = ranks_sum(world) if world.rank == root else world.rank + 1
        assert torch.equal(values(tensor), torch.full((2, 3), expected, dtype=dtype))


def test_all_gather_of_uneven_sizes(world, place):
    own = place(torch.full((world.rank + 1,), float(world.rank)))
    pieces = [place(torch.zeros(rank + 1)) for rank in range(world.size)]
    dist.all_gather(pieces, own)
    for rank, piece in enumerate(pieces):
        assert values(piece).tolist() == [float(rank)] * (rank + 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64, torch.complex128], ids=str)
def test_gather_and_scatter(world, place, dtype):
    for root in range(world.size):
        own = place(torch.full((3,), world.rank % 2).to(dtype))
        pieces = [place(torch.zeros(3, dtype=dtype)) for _ in range(world.size)]
        dist.gather(own, pieces if world.rank == root else None, dst=root)
        if world.rank == root:
            gathered = [values(piece)[0].item() for piece in pieces]
            assert gathered == [torch.tensor(rank % 2).to(dtype) for rank in range(world.size)]
        back = place(torch.zeros(3, dtype=dtype))
        dist.scatter(back, pieces if world.rank == root else None, src=root)
        assert torch.equal(values(back), values(own))


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="came with torch 2.14")
def test_gather_into_one_tensor(world, place):
    own = place(torch.full((2, 3), float(world.rank)))
    expected = torch.arange(float(world.size)).repeat_interleave(6)
    for root in range(world.size):
        for shape in ((world.size * 2, 3), (world.size * 6,)):
            whole = place(torch.zeros(shape)) if world.rank == root else None
            dist.gather_single(own, whole, dst=root)
            if whole is not None:
                assert torch.equal(values(whole), expected.reshape(shape))
    if world.rank == world.size - 1:
        with pytest.raises(UnsupportedError, match="has 7 elements"):
            dist.gather_single(own, place(torch.zeros(7)), dst=world.rank)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter(world, place, dtype):
    whole = torch.arange(world.size * 4).reshape(world.size * 2, 2) % 7
    tensor = place((whole * (world.rank + 1)).to(dtype))
    output = place(torch.zeros(2, 2, dtype=dtype))
    dist.reduce_scatter_tensor(output, tensor)
    expected = (whole * ranks_sum(world)).to(dtype)[2 * world.rank : 2 * world.rank + 2]
    assert torch.equal(values(output), expected)


def test_reduce_scatter_of_uneven_pieces(world, place):
    pieces = [place(torch.full((rank + 1,), float(world.rank + 1))) for rank in range(world.size)]
    output = place(torch.zeros(world.rank + 1))
    dist.reduce_scatter(output, pieces)
    assert values(output).tolist() == [float(ranks_sum(world))] * (world.rank + 1)
    dist.reduce_scatter(output, pieces, op=dist.ReduceOp.AVG)
    assert values(output).tolist() == [ranks_sum(world) / world.size] * (world.rank + 1)


def test_all_to_all_of_uneven_pieces(world, place):
    sent = [
        place(torch.full((target + 1,), 10.0 * world.rank + target)) for target in range(world.size)
    ]
    received = [place(torch.zeros(world.rank + 1)) for _ in range(world.size)]
    dist.all_to_all(received, sent)
    for source, piece in enumerate(received):
        assert values(piece).tolist() == [10.0 * source + world.rank] * (world.rank + 1)


def test_all_to_all_single_of_more_than_mpi_can_count(world, place, monkeypatch):
    """The other ranks, whose part is small, do not know that it is."""
    if world.rank == 0:
        monkeypatch.setattr(host_collectives, "MAX_COUNT", 16)
    given = [(world.rank + target) % 3 for target in range(world.size)]
    taken = [(world.rank + source) % 3 for source in range(world.size)]
    tensor = place(torch.arange(sum(given) * 5, dtype=torch.uint8).view(-1, 5) + 50 * world.rank)
    output = place(torch.zeros(sum(taken), 5, dtype=torch.uint8))
    for in_background in (False, True):
        work = dist.all_to_all_single(output, tensor, taken, given, async_op=in_background)
        if in_background:
            work.wait()
        pieces = values(output).split(taken)
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
        assert values(first).tolist() == [1.0] * 5
        assert values(second).sum().item() == 140_000.0
        got = place(torch.zeros(1))
        assert dist.recv(got, tag=3) == last
        assert values(got).item() == 3.0
    elif world.rank == last:
        dist.send(place(torch.ones(5)), 0, tag=1)
        dist.send(place(torch.full((70_000,), 2.0)), 0, tag=2)
        dist.send(place(torch.full((1,), 3.0)), 0, tag=3)


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


@pytest.mark.ranks(2)
def test_batched_messages_between_all_neighbours(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    outgoing = torch.full((40_000,), float(world.rank))
    incoming = torch.zeros(40_000)
    operations = [
        dist.P2POp(dist.isend, outgoing, right),
        dist.P2POp(dist.irecv, incoming, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(incoming, torch.full((40_000,), float(left)))


@pytest.mark.parametrize(
    "call",
    [
        lambda n: dist.all_gather([torch.zeros(2)] * (n + 1), torch.zeros(2)),
        lambda n: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * n + 1)),
        lambda n: dist.all_to_all_single(torch.zeros(n), torch.zeros(n), [5] * n, [1] * n),
    ],
)
def test_mismatched_arguments_are_rejected_before_anything_is_sent(world, call):
    with pytest.raises((UnsupportedError, ValueError)):
        call(world.size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world.size
