"""Models that compute on several streams of a device train like one process, in every way.

Nothing but the model lets a stream wait for another, and each is late at times.
"""

import copy
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
from choices import by_default
from collective_cases import values
from fake_device import Stream, current_stream, stream
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import mostly_in_one_kind

from kaitian_mpi import WeightedSum
from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.distributed.gathering import ParameterGathers
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.shard_buckets import ShardBucket
from kaitian_mpi.distributed.sharded_model import ShardedModel
from kaitian_mpi.train.layouts.shard.shards import Shards

STEPS = 2


def be_late(tensor, sec=0.05):
    """Let the current stream of a tensor's device do later what it is given from now on."""
    if not tensor.is_cpu:
        current_stream().give(lambda: time.sleep(sec))


class Side:
    """A second stream beside the current one of a device; on a host, nothing."""

    def __init__(self, x):
        """Let it begin after what the current one has to do, and use `x`."""
        self._stream = None if x.is_cpu else Stream(x.device)
        if self._stream is not None:
            self._stream.wait_event(current_stream().record_event())
            x.record_stream(self._stream)

    def current(self):
        return nullcontext() if self._stream is None else stream(self._stream)

    def joined(self, tensor):
        """Let the current stream wait for this one, and use its `tensor`."""
        if self._stream is not None:
            tensor.record_stream(current_stream())
            current_stream().wait_event(self._stream.record_event())
        return tensor


class OnTwoStreams(nn.Module):
    """Uses one layer on both streams, and changes on the second what is next left on the first.

    The last gradient is of the first stream, which waits for no other of the second.
    """

    def __init__(self):
        super().__init__()
        self.first, self.both, self.second, self.third = (nn.Linear(64, 64) for _ in range(4))
        self.forwards = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, x):
        side = Side(x)
        hidden = self.first(x)
        with side.current():
            y = x.detach().requires_grad_()  # so that backward needs the weights
            other = self.both(y)
        be_late(x, 0.2)
        hidden = hidden + self.both(x)
        with side.current(), torch.no_grad():
            count = self.forwards + 1
            be_late(x, 0.3)
            self.forwards.copy_(count)
        hidden = hidden + self.third(x)
        with side.current():
            other = self.second(other)
            if other.requires_grad:
                other.register_hook(be_late)
        return hidden + side.joined(other)


class InOnePiece:
    """Trains a model whose parameters are whole on each rank."""

    def __init__(self, world, model, optimizers):
        self.model = model.to(world.device)
        self._optimizers = optimizers(model)
        self._weight = 1 / world.size

    def values(self):
        return [values(parameter) for parameter in self.model.parameters()]

    def close(self):
        pass

    def step(self):
        for optimizer in self._optimizers:
            optimizer.step()
        self.model.zero_grad()


class ByReducer(InOnePiece):
    def __init__(self, *given):
        super().__init__(*given)
        self._reducer = GradientReducer(self.model)

    def train(self, x):
        self._reducer.arm(self._weight)
        output = self.model(x)
        output.square().mean().backward()
        self._reducer.finish()
        self.step()
        return output


class ByDdp(InOnePiece):
    def __init__(self, *given):
        super().__init__(*given)
        self._ddp = DistributedDataParallel(self.model)
        self._sum = WeightedSum()
        self._sum.attach(self._ddp)
        self._sum.weight = self._weight

    def train(self, x):
        output = self._ddp(x)
        output.square().mean().backward()
        self.step()
        return output


class InShards:
    """Trains a model in shards, whose parameters are whole on each rank or sharded."""

    overlaps = True
    in_parts = False

    def __init__(self, world, model, optimizers):
        self._world, self._sharded_model, kept = world, None, {}
        if self.in_parts:
            rows = [(number, 0, len(p)) for number, p in enumerate(model.parameters())]
            self._sharded_model = ShardedModel(model, range(len(rows)), world.device)
            kept = self._sharded_model.shard(rows if world.rank == 0 else [])
        self.model = model.to(world.device) if self._sharded_model is None else model
        self._optimizers = optimizers(model)
        self._shards = Shards(self.model, self._optimizers, self._sharded_model, kept)
        self._shards.assign(world, without_mirrors([1.0] * world.size))
        self._gathering = self._shards.gathering(world, lambda _: nullcontext())
        self._reducer = self._shards.reducer(
            self.model,
            overlaps=self.overlaps,
            gathering=self._gathering,
        )

    def train(self, x):
        self._reducer.arm(1 / self._world.size)
        with self._whole(lambda gathering: gathering.unshard):
            output = self.model(x)
            output.square().mean().backward()
        if self._sharded_model is not None:
            self._reducer.end_round()
        self._reducer.finish()
        for optimizer in self._optimizers:
            optimizer.step()
        self._shards.zero_gradients()
        self._reducer.share_values()
        return output

    @contextmanager
    def _whole(self, source_of):
        if self._sharded_model is None:
            yield
            return
        self._sharded_model.begin(source_of(self._gathering), self._gathering.write_back)
        yield
        self._sharded_model.end()

    def values(self):
        self._reducer.check_values()
        with self._whole(lambda gathering: gathering.independent.unshard):
            weights = [values(parameter) for parameter in self.model.parameters()]
        if self._gathering is not None:
            self._gathering.independent.join_others()
        return weights

    def close(self):
        self._reducer.close()


class InShardsThatWait(InShards):
    overlaps = False


class InParts(InShards):
    in_parts = True


WAYS = ByReducer, ByDdp, InShards, InShardsThatWait, InParts


@mostly_in_one_kind
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=pytest.mark.thorough(3)) for way in (ByReducer, InShards)),
        *by_default([ByDdp, InShardsThatWait, InParts], (InParts,)),
    ],
)
def test_a_model_that_computes_on_two_streams_trains_like_one_process(world, way, monkeypatch):
    def late(function):
        def call(*arguments, **options):
            be_late(torch.empty(0, device=world.device))
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(ShardBucket, "store", late(ShardBucket.store))
    monkeypatch.setattr(ParameterGathers, "start", late(ParameterGathers.start))
    torch.manual_seed(5)
    alone = OnTwoStreams()

    def optimizers(model):
        return [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)]

    trained = way(world, copy.deepcopy(alone), optimizers)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    steps = optimizers(alone)
    for _ in range(STEPS):
        output, expected = trained.train(x.to(world.device)), alone(x)
        assert (values(output) - expected).abs().max().item() <= 1e-4
        expected.square().mean().backward()
        for optimizer in steps:
            optimizer.step()
        alone.zero_grad()
    for one, other in zip(trained.values(), alone.parameters(), strict=True):
        assert (one - other).abs().max().item() <= 1e-4
    trained.close()


@pytest.mark.sizes(2)
def test_the_memory_of_values_in_parts_is_kept_for_each_stream_that_uses_them(world):
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)]), torch.ones(3, 64)
    expected = torch.full((3, 64), 66.0)
    sharded = ShardedModel(model, range(4), world.device)
    sharded.shard([])
    x = x.to(world.device)
    for _ in range(3):  # the first of a kind waits for the device
        sharded.begin(lambda number: sharded.empty_values(number).fill_(number + 1.0))
        side = Side(x)
        with side.current():
            model[0](x)
        be_late(x, 0.2)
        output = model[0](x)
        with side.current():
            model[1](x)
        assert torch.equal(values(output), expected)
        sharded.end()
