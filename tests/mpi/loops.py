"""A training of a few points, loop by loop; which samples each step has is known of all ranks."""

import itertools
import math
from contextlib import redirect_stdout
from io import StringIO

import torch
from given_layouts import MirroredBudget
from samples import BATCH, LENGTH, Points
from shared.loops import LoopMaker
from torch import nn

from kaitian_mpi.balance.ownership import Need
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.recipes.datasets import DataSource
from kaitian_mpi.recipes.image_classification import classify
from kaitian_mpi.train.layouts.shard.memory_budget import MemoryBudget
from kaitian_mpi.train.layouts.shard.shard_layout import ShardLayout
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Computation

EPOCHS = 2
STEPS = math.ceil(LENGTH / BATCH)


def uneven(world):
    return shares_of([rank + 1 for rank in range(world.size)])


def reverse(world):
    return shares_of([world.size - rank for rank in range(world.size)])


def shares_of(weights):
    shares = [BATCH * w // sum(weights) for w in weights]
    shares[0] += BATCH - sum(shares)
    return shares


def make_plan(world, shares, micro_batch_size=None, min_batch=1):
    scores = [1.0] * world.size
    return Plan(shares, scores, None, micro_batch_size, min_batch=min_batch)


def classify_points(model, config=None, data=None):
    data = data or Points()
    return classify(config or TrainConfig(), model, DataSource(data, data, 4))


def make_state(world, task, steps=10):
    return State(task, Computation(world.device, "fp32", "contiguous"), steps)


def shard_layout(world, memory, sharded=(), mirrors=False, can_overlap=True):
    """Return layout shard for ranks with memory in these proportions."""
    by_place = {info.place: own for info, own in zip(world.infos, memory, strict=True)}
    need = Need(owned=0, bucket=0, buffers=0, small=0 if can_overlap else 10**9)
    budget = (MirroredBudget if mirrors else MemoryBudget)(by_place, need, frozenset(sharded))
    return ShardLayout(budget, reserved=0)


class RefusedError(CollectiveError):
    """The error that a refused commit raises here."""


class Run:
    """A run of two epochs, by as many loops as its commits allow."""

    def __init__(
        self, world, shares, *, task=None, model=None, layers=(), data=None, commit=None,
        micro_batch_size=None, min_batch=1, evaluates=True, layout=None, **settings,
    ):  # fmt: skip
        self.world, self.shares, self.commit = world, shares, commit
        self.evaluates = evaluates
        settings = {"epochs": EPOCHS, "log_interval": 60, "lr": 0.1, **settings}
        self.config = TrainConfig(global_batch_size=sum(shares), **settings)
        torch.manual_seed(3)
        layers = nn.Linear(3, 16), *layers, nn.Tanh(), nn.Linear(16, 4)
        model = model or nn.Sequential(*layers).double()
        task = task or classify_points(model, self.config, data)
        self.maker = LoopMaker(self.config, world, task, layout, min_batch=min_batch)
        self.setup, self.state, self.model = self.maker.setup, self.maker.state, task.model
        self.steps = self.state.progress.total_steps
        self.plan_of = lambda shares: make_plan(world, shares, micro_batch_size, min_batch)
        self.taken = []
        """This rank's samples in each completed step."""
        self.results, self.refusals = [], 0
        self.make_loop()

    def make_loop(self):
        with redirect_stdout(StringIO()):  # which says who has what
            self.loop = self.maker.make(self.plan_of(self.shares), self.commit)

    def epoch(self):
        """Yield the steps of an epoch as they are trained."""
        while (parts := self.loop.fetch()) is not None:
            step = self.loop.train(parts)
            inputs = [inputs for _, (inputs, _) in parts]
            numbers = (torch.cat(inputs)[:, 0] * len(self.setup.train)).round().long()
            self.taken.append(numbers.tolist() if parts[0].samples else [])
            yield step

    def train(self, plans=None, other_shares=None):
        """Train both epochs, setting plans by step, and others where a commit is refused."""
        while not self.state.progress.is_done:
            try:
                for step in self.epoch():
                    if step.number in (plans or {}):
                        self.loop.sampler.set_plan(plans[step.number])
                if self.evaluates:
                    self.results.append(self.loop.evaluate())
                self.state.progress.epoch_done(EPOCHS)
            except RefusedError:
                self.refusals += 1
                self.loop.close()
                self.shares = other_shares or self.shares
                self.make_loop()
        self.close()
        return self

    def close(self):
        self.loop.close()
        self.maker.close()

    def by_step(self):
        """Return the samples of all ranks, by step."""
        ranks = gather_values(self.world.comm, self.taken)
        return [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]

    def assert_each_sample_once(self):
        steps = self.by_step()
        assert len(steps) == EPOCHS * STEPS
        for epoch in (steps[:STEPS], steps[STEPS:]):
            assert sorted(itertools.chain(*epoch)) == list(range(LENGTH))

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])
