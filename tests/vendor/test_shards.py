"""Layout shard on devices whose kind has a library, beside kinds that have none or another."""

import copy
import time
from contextlib import nullcontext

import fake_library
import pytest
import torch
import torch.distributed as dist
from collective_cases import agree, values
from fake_device import current_stream
from uneven import SHARES, loss_of, network

from kaitian_mpi.balance.ownership import with_mirrors, without_mirrors
from kaitian_mpi.train.measure.layouts import measure_exchange
from kaitian_mpi.train.shards import Shards

MEMORY = [1, 3, 2, 5]


class InParts:
    """A model of whose parameters all but the last come from their owners before they are used.

    The emulated device's tensors have a class of their own, as a `PartedModel`'s parameters must.
    """

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.numbers = frozenset(range(len(self.parameters) - 1))
        self.name = str

    def room_for(self, number):
        return torch.empty_like(self.parameters[number])

    def bring(self, source):
        for number in sorted(self.numbers):
            self.parameters[number].detach().copy_(source(number))


CALLS = {"reduce_scatter", "allgather", "alltoall"}


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "form"),
    [
        *[
            (torch.float64, 1e-12, "mirrors"),
            (torch.float64, 1e-12, ""),
            (torch.float64, 1e-12, "parts"),
        ],
        *[(torch.float32, 1e-4, "mirrors"), (torch.float32, 1e-4, "parts")],
    ],
)
def test_owners_on_devices_train_like_one_process(world, dtype, tolerance, form):
    mirrors, in_parts = form == "mirrors", form == "parts"
    shares, memory = SHARES[: world.size], MEMORY[: world.size]
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(4, sum(shares), 3, 8, 8, generator=generator).to(dtype)
    labels = torch.randint(5, (4, sum(shares)), generator=generator)
    alone = network().to(dtype)
    ours = copy.deepcopy(alone).to(world.device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (alone, ours)]
    shards = Shards(ours, optimizers[1:])
    hosts = [str(rank) for rank in range(world.size)]
    shards.assign(world, with_mirrors(memory, hosts) if mirrors else without_mirrors(memory))
    parted = InParts(ours) if in_parts else None
    gathering = shards.gathering(parted, world, lambda what: nullcontext()) if in_parts else None
    reducer = shards.reducer(ours, bucket_caps=(2000, 4000), gathering=gathering)
    reducer.rounds = 2
    fake_library.calls.clear()
    for step in range(4):
        loss_of(images[step], labels[step], 1, alone).backward()
        own = shares[(world.rank + step) % world.size]
        begin = sum(shares[(rank + step) % world.size] for rank in range(world.rank))
        mine, wanted = (each[step, begin : begin + own] for each in (images, labels))
        count = min(2, own)  # micro-batches
        pieces = [*zip(mine.chunk(count), wanted.chunk(count), strict=True)] if own else []
        for piece in pieces:
            if in_parts:
                parted.bring(gathering.bring)
            reducer.arm(own / sum(shares))
            loss_of(*piece, len(piece[0]) / own, ours).backward()
            if in_parts:
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
            parted.bring(gathering.bring_any)
            gathering.end_any()
        assert agree(world, torch.cat([values(p).flatten() for p in ours.parameters()]))
    reducer.close()
    for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
        assert one.device.type == world.device.type
        assert (values(one) - other).abs().max().item() <= tolerance
    is_alone = len(world.groups) == 1 and world.info.kind != "cpu"
    if is_alone and dtype is torch.float32:
        assert {*fake_library.calls} >= CALLS - ({"alltoall"} if in_parts else set())
    assert is_alone or not fake_library.calls


@pytest.mark.sizes(2)
def test_an_exchange_is_measured_until_the_device_has_done_it(world, monkeypatch):
    """Libraries return once they have queued it."""

    def queued(exchange):
        def call(*arguments):
            exchange(*arguments)
            current_stream().give(lambda: time.sleep(0.02))

        return call

    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(dist, name, queued(getattr(dist, name)))
    for cost in measure_exchange(world, 1 << 16):
        assert cost.seconds(1 << 16) >= 0.02 or "vendor" not in world.kinds
