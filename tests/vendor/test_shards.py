"""Layout shard on devices whose kind has a library, beside kinds that have none or another."""

import copy
import gc
import time
from contextlib import nullcontext

import fake_library
import pytest
import torch
import torch.distributed as dist
from choices import by_default
from collective_cases import agree, values
from contracts import CONTRACTS, chosen_name
from fake_device import current_stream
from torch import nn
from uneven import SHARES, loss_of, network
from worlds import mostly_in_one_kind, mostly_in_several_kinds

from kaitian_mpi.balance.ownership import with_mirrors, without_mirrors
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.collectives import across_groups, hybrid
from kaitian_mpi.distributed.shard_buckets import ShardBucket
from kaitian_mpi.distributed.sharded_model import ShardedModel
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.mpi import pairwise
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import keep_ranks
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.train.layouts.choose import measure_exchange
from kaitian_mpi.train.layouts.shard.memory_budget import MemoryBudget, shard_needs
from kaitian_mpi.train.layouts.shard.shards import Shards

MEMORY = [1, 3, 2, 5]


LONG_SEC = 20.0  # in which a device computes a little, however busy the machine is
TAG = 999  # of no library's message
CALLS = {"reduce_scatter", "allgather", "alltoall"}


FEWER = pytest.mark.sizes(2, 3)
ON_ANY = pytest.mark.sizes(2, 3, 4)
ALSO_ON_3, ALSO_ON_4 = pytest.mark.thorough(3), pytest.mark.thorough(4)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "form"),
    [
        pytest.param(torch.float64, 1e-12, "", marks=[ON_ANY, pytest.mark.thorough]),
        pytest.param(torch.float64, 1e-12, "mirrors", marks=[FEWER, ALSO_ON_3]),
        pytest.param(torch.float64, 1e-12, "parts", marks=[FEWER, pytest.mark.thorough]),
        # Which the libraries sum.
        pytest.param(torch.float32, 1e-4, "mirrors", marks=[ON_ANY, pytest.mark.thorough]),
        pytest.param(torch.float32, 1e-4, "parts", marks=[ON_ANY, ALSO_ON_4]),
    ],
)
def test_owners_on_devices_train_like_one_process(world, dtype, tolerance, form):
    mirrors, in_parts = form == "mirrors", form == "parts"
    shares, memory = SHARES[: world.size], MEMORY[: world.size]
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(4, sum(shares), 3, 8, 8, generator=generator).to(dtype)
    labels = torch.randint(5, (4, sum(shares)), generator=generator)
    alone = network().to(dtype)
    ours = copy.deepcopy(alone)
    sharded, kept = None, {}
    if in_parts:  # all but the last
        rows = [(number, 0, len(p)) for number, p in enumerate(ours.parameters())][:-1]
        sharded = ShardedModel(ours, range(len(rows)), world.device)
        kept = sharded.shard(rows if world.rank == 0 else [])
    else:
        ours = ours.to(world.device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (alone, ours)]
    shards = Shards(ours, optimizers[1:], sharded, kept)
    hosts = [str(rank) for rank in range(world.size)]
    shards.assign(world, with_mirrors(memory, hosts) if mirrors else without_mirrors(memory))
    gathering = shards.gathering(world, lambda name: nullcontext())
    reducer = shards.reducer(ours, bucket_caps=(2000, 4000), gathering=gathering)
    reducer.begin_step(rounds=2)
    fake_library.calls.clear()
    for step in range(4):
        loss_of(images[step], labels[step], 1, alone).backward()
        rank_samples = shares[(world.rank + step) % world.size]
        begin = sum(shares[(rank + step) % world.size] for rank in range(world.rank))
        mine, wanted = (dataset[step, begin : begin + rank_samples] for dataset in (images, labels))
        count = min(2, rank_samples)  # micro-batches
        pieces = [*zip(mine.chunk(count), wanted.chunk(count), strict=True)] if rank_samples else []
        for piece in pieces:
            reducer.arm(rank_samples / sum(shares))
            if in_parts:
                sharded.begin(gathering.unshard)
            loss_of(*piece, len(piece[0]) / rank_samples, ours).backward()
            if in_parts:
                sharded.end()
                reducer.end_round()
        if not pieces:
            reducer.arm(None)
        reducer.finish()
        assert reducer.is_finite()
        for optimizer in optimizers:
            optimizer.step()
        alone.zero_grad()
        shards.zero_gradients()
        reducer.share_values()
        reducer.check_values()
        if in_parts:
            sharded.begin(gathering.independent.unshard)
        here = [values(p) for p in ours.parameters()]
        if in_parts:
            sharded.end()
            gathering.independent.join_others()
        assert agree(world, torch.cat([parameter.flatten() for parameter in here]))
    reducer.close()
    assert {p.device.type for p in ours.parameters()} == {world.device.type}
    for one, other in zip(here, alone.parameters(), strict=True):
        assert (one - other).abs().max().item() <= tolerance
    is_alone = len(world.groups) == 1 and world.info.kind != "cpu"
    if is_alone and dtype is torch.float32:
        assert {*fake_library.calls} >= CALLS - ({"alltoall"} if in_parts else set())
    assert is_alone or not fake_library.calls


@pytest.fixture
def sent_bytes(monkeypatch):
    """Return the bytes that this rank has sent to others by messages, of whatever collective."""
    counted, exchange = [0], pairwise.exchange

    def counting(comm, sent, received):
        counted[0] += sum(t.nbytes for r, t in enumerate(sent) if t is not None and r != comm.rank)
        exchange(comm, sent, received)

    monkeypatch.setattr(pairwise, "exchange", counting)
    return counted


@pytest.mark.sizes(3)
@mostly_in_several_kinds
def test_rounds_across_groups_keep_to_the_relays_memory(world, device_of, monkeypatch):
    """The least that any rank allows, as their rounds are alike."""
    if len(world.groups) == 1:
        pytest.skip("one library does it all")
    monkeypatch.setattr(hybrid, "_LONG_BYTES", 1000)
    monkeypatch.setattr(world.communication, "relay_memory_mb", 1 + world.rank)
    group = dist.new_group()
    pieces = [device_of(torch.arange(1 << 18).float()) for _ in range(world.size)]
    output = torch.zeros_like(pieces[0])
    dist.reduce_scatter(output, pieces, group=group)
    assert torch.equal(values(output), world.size * torch.arange(1 << 18).float())
    dist.all_gather(pieces, output, group)
    for piece in pieces:
        assert torch.equal(values(piece), values(output))
    for _, slots in group.relay._paths.values():
        assert 0 < slots.provide(0, 0) * slots.take().memory.nbytes <= 1 << 20
    dist.destroy_process_group(group)


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize(
    "dtype",
    by_default([torch.float32, torch.float64, torch.bfloat16], [torch.float32, torch.float64]),
)
@pytest.mark.parametrize("lengths", [(9001, 0, 5003, 7), (4000, 4000, 4000, 4000)])
def test_kinds_sum_and_gather_by_their_library_and_parts_cross_once(
    world, device_of, sent_bytes, monkeypatch, dtype, lengths
):
    """In rounds, also of ranks whose parts are unlike, or empty."""
    if len(world.groups) == 1:
        pytest.skip("one library does it all")
    monkeypatch.setattr(hybrid, "_LONG_BYTES", 1000)
    monkeypatch.setattr(across_groups, "_ROUND_BYTES", 16_000)
    lengths, generator = lengths[: world.size], torch.Generator().manual_seed(3)
    whole = torch.randn(world.size, sum(lengths), generator=generator).to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    # A library that lacks the dtype leaves it to messages, also inside its group.
    by_library = dtype is not torch.float64 or chosen_name() != "hccl"
    once, always = len(world.groups) - 1, world.size - 1

    def parts_of(row):
        return row.split(lengths)

    def has_crossed(itemsize, in_groups=True):
        crossed = sum(gather_values(world.comm, sent_bytes[0])) / sum(lengths) / itemsize
        sent_bytes[0] = 0
        if by_library or not in_groups:
            return crossed == (once if in_groups else always)
        return crossed <= always

    def check_sum(output, divisor=1):
        exact = parts_of(whole.double().sum(0))[world.rank] / divisor
        # That of the result, and of sums before it in the wider dtype.
        rounding = torch.finfo(dtype).eps * exact.abs() / 2 + 8 * torch.finfo(wide).eps
        assert ((values(output).double() - exact).abs() <= rounding * 1.01).all()

    pieces = [device_of(piece) for piece in parts_of(whole[world.rank])]
    output = device_of(torch.zeros(lengths[world.rank], dtype=dtype))
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world.size)):
        sent_bytes[0] = 0
        dist.reduce_scatter(output, pieces, op)
        check_sum(output, divisor)
        # 32 bits of each group's sum are more than 16 of each rank.
        in_groups = wide.itemsize * once < dtype.itemsize * always
        assert has_crossed(wide.itemsize if in_groups else dtype.itemsize, in_groups)
    for piece, part in zip(pieces, parts_of(whole[world.rank]), strict=True):
        assert torch.equal(values(piece), part)  # what is summed stays as it was
    dist.all_gather(pieces, device_of(parts_of(whole[0])[world.rank]))
    assert has_crossed(dtype.itemsize)
    for piece, part in zip(pieces, parts_of(whole[0]), strict=True):
        assert torch.equal(values(piece), part)
    if len({*lengths}) > 1:
        return
    joined = device_of(torch.zeros(sum(lengths), dtype=dtype))
    dist.all_gather_into_tensor(joined, device_of(parts_of(whole[0])[world.rank]))
    assert torch.equal(values(joined), whole[0])
    dist.reduce_scatter_tensor(output, device_of(whole[world.rank]))
    check_sum(output)


@pytest.mark.sizes(2)
def test_an_exchange_is_measured_as_it_is_made_until_the_device_has_done_it(world, monkeypatch):
    """Libraries return once they have queued it."""

    def queued(start):
        def call(*arguments):
            work = start(*arguments)
            current_stream().give(lambda: time.sleep(0.02))
            return work

        return call

    for name in ("start_sum", "start_gather"):
        monkeypatch.setattr(ShardBucket, name, queued(getattr(ShardBucket, name)))
    fake_library.calls.clear()
    for cost in measure_exchange(world, 1 << 16):
        assert cost.seconds(1 << 16) >= 0.02 or "vendor" not in world.kinds
    is_joined = set(world.kinds) == {"vendor"}
    expected = {"reduce_scatter_single", "all_gather_single"} if is_joined else set()
    assert {*fake_library.calls} == expected


@pytest.mark.sizes(3, 4)
def test_values_that_a_lost_rank_was_to_send_are_not_taken_from_what_an_abort_left(world):
    """The library says that they are here before the device has them."""
    if len(world.groups) > 1 or not CONTRACTS[chosen_name()].ended_by:
        pytest.skip("without a library of all, nothing is left; some libraries have no abort")
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(world.size, 2, 3, 8, 8, generator=generator).double()
    labels = torch.randint(5, (world.size, 2), generator=generator)
    alone = network().double()
    ours = copy.deepcopy(alone).to(world.device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (alone, ours)]
    shards, hosts = Shards(ours, optimizers[1:]), [str(rank) for rank in range(world.size)]
    shards.assign(world, with_mirrors([1.0] * world.size, hosts))
    group = dist.new_group()
    reducer = shards.reducer(ours, group=group, bucket_caps=(2000, 4000))
    for step in range(2):
        loss_of(images.flatten(0, 1), labels.flatten(), 1, alone).backward()
        reducer.arm(1 / world.size)
        loss_of(images[world.rank], labels[world.rank], 1, ours).backward()
        reducer.finish()
        for optimizer in optimizers:
            optimizer.step()
        alone.zero_grad()
        shards.zero_gradients()
        if step == 0:
            reducer.share_values()
    lost = world.size - 1
    survivors = keep_ranks(world, range(lost))
    if survivors is not None:
        reducer.share_values()
        for library in group._libraries:
            library._connection._fail(RankLostError("a rank is lost"))
        loss_of(images[world.rank], labels[world.rank], 1, ours)  # which waits for all values
        with pytest.raises(CollectiveError):
            reducer.check_values()
        assert not reducer.values.are_here
        shards.assign(survivors, without_mirrors([1.0] * lost))
        for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
            assert (values(one) - other).abs().max().item() <= 1e-12
    reducer.close()
    dist.destroy_process_group(group)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(
    ("has_biases", "cap"), [(False, 1 << 18), (True, 1 << 20)], ids=["equal", "nearly equal"]
)
def test_parts_of_one_length_are_exchanged_without_a_copy_of_all(world, has_biases, cap):
    """Of a list of tensors a library makes one, of all values that come while others compute."""
    if len(world.groups) > 1:
        pytest.skip("in host memory, each part is a message")
    layers = [nn.Linear(256, 256, bias=has_biases) for _ in range(6)]
    model = nn.Sequential(*layers).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shards = Shards(model, [optimizer])
    shards.assign(world, without_mirrors([1.0] * world.size))
    reducer = shards.reducer(model, bucket_caps=(cap, cap))
    module = torch.get_device_module(world.device)
    fake_library.calls.clear()
    for _ in range(2):
        reducer.arm(1.0)
        model(torch.ones(3, 256, device=world.device)).square().sum().backward()
        reducer.finish()
        optimizer.step()
        shards.zero_gradients()
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        reducer.share_values()
        assert module.max_memory_allocated() == before
    reducer.check_values()
    assert {*fake_library.calls} == {"reduce_scatter_single", "all_gather_single"}
    assert agree(world, torch.cat([p.detach().flatten() for p in model.parameters()]))
    reducer.close()


@pytest.mark.sizes(2)
def test_backward_does_not_wait_on_the_device_for_a_rank_that_is_behind(world):
    """If there are buffers for all buckets; a library's sum ends when all ranks have begun it."""
    if len(world.groups) > 1:
        pytest.skip("in host memory, the host waits")
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(9)]).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards = Shards(model, [optimizer])
    shards.assign(world, without_mirrors([1.0] * world.size))
    reducer = shards.reducer(model, bucket_caps=(1200, 1200))
    assert len(reducer._layout.buckets) > 4
    x = torch.ones(3, 16, device=world.device)
    dist.all_reduce(x.clone())  # which makes the library's communicator
    for _ in range(2):
        reducer.arm(0.5)
        if world.rank:
            world.comm.recv(source=0, tag=TAG)
        model(x).square().sum().backward()
        end = current_stream().record_event()
        if world.rank == 0:
            is_reached = wait_until(end.query, LONG_SEC)
            world.comm.send(None, 1, TAG)
            assert is_reached
        reducer.finish()
        optimizer.step()
        shards.zero_gradients()
        reducer.share_values()
    reducer.check_values()
    assert agree(world, torch.cat([p.detach().flatten() for p in model.parameters()]))
    reducer.close()


@mostly_in_one_kind
@pytest.mark.sizes(2, 3)
def test_what_mirrors_copy_until_values_have_arrived_is_planned(world):
    """Where a library brings them: else MPI says whether they have."""
    layers = [nn.Linear(256, 256, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shards, memory = Shards(model, [optimizer]), MEMORY[: world.size]
    pairs = with_mirrors(memory, [str(rank) for rank in range(world.size)])
    shards.assign(world, pairs)
    reducer = shards.reducer(model, bucket_caps=(1 << 18, 1 << 18))
    needs, _ = shard_needs(TrainingConfig(layout="shard"), model, [optimizer])
    planned = MemoryBudget({}, needs[0]).copied(pairs, world)[world.rank]
    for _ in range(2):
        reducer.arm(1.0)
        model(torch.ones(3, 256, device=world.device)).square().sum().backward()
        reducer.finish()
        optimizer.step()
        shards.zero_gradients()
        gc.collect()  # what earlier tests have left
        before = device_bytes(world)
        reducer.share_values()
        copied = device_bytes(world) - before
        reducer.check_values()
    reducer.close()
    if len(world.groups) == 1 and world.info.kind != "cpu":
        assert 0 < copied == pytest.approx(planned, rel=0.05)
    else:
        assert planned == 0


def device_bytes(world):
    if world.info.kind == "cpu":
        return 0
    module = torch.get_device_module(world.device)
    module.synchronize()
    return module.memory_allocated()
