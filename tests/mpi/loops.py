"""A training of a few points, loop by loop; which samples each step has is known of all ranks."""

import itertools
import math

import torch
from samples import BATCH, LENGTH, Points
from torch import nn

from kaitian_mpi.balance.ownership import with_mirrors, without_mirrors
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.distributed.late_values import PartedModel
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.recipes.datasets import DataSource
from kaitian_mpi.recipes.image_classification import classify
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.engine import Engine
from kaitian_mpi.train.layouts.shard.engine import ShardEngine
from kaitian_mpi.train.layouts.shard.shards import Shards
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.progress import count_steps
from kaitian_mpi.train.setup import Setup
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


def make_task(model, config=None, data=None):
    data = data or Points()
    return classify(config or TrainConfig(), model, DataSource(data, data, 4))


def make_state(world, task, steps=10):
    return State(task, Computation(world.device, "fp32", "contiguous"), steps)


class RefusedError(CollectiveError):
    """The error that a refused commit raises here."""


class Run:
    """A run of two epochs, by as many loops as its commits allow."""

    def __init__(
        self, world, shares, *, model=None, layers=(), data=None, commit=None,
        micro_batch_size=None, min_batch=1, evaluates=True, memory=None, mirrors=False, parted=(),
        **settings,
    ):  # fmt: skip
        self.world, self.shares, self.commit = world, shares, commit
        self.evaluates = evaluates
        settings = {"epochs": EPOCHS, "log_interval": 60, "lr": 0.1, **settings}
        self.config = TrainConfig(global_batch_size=sum(shares), **settings)
        torch.manual_seed(3)
        layers = nn.Linear(3, 16), *layers, nn.Tanh(), nn.Linear(16, 4)
        self.model = model or nn.Sequential(*layers).double()
        self.setup = Setup(make_task(self.model, self.config, data), NoFolder())
        length = len(self.setup.train)
        self.steps = count_steps(self.config, length, sum(shares), min_batch)
        self.state = make_state(world, self.setup.task, self.steps)
        if memory is not None:
            values = {}
            if parted:
                self.state.parted = PartedModel(self.state.model, parted, world.device)
                rows = [(n, 0, len(p)) for n, p in enumerate(self.state.model.parameters())]
                values = self.state.parted.keep(rows if world.rank == 0 else [])
            own = self.state.model, self.state.optimizers, self.state.parted, values
            self.state.partition = Shards(*own)
            hosts = [str(rank) for rank in range(world.size)]
            pairs = with_mirrors(memory, hosts) if mirrors else without_mirrors(memory)
            self.state.partition.assign(world, pairs)
        self.loader = ShareLoader(self.setup.train, self.config.workers, pin_memory=False)
        self.plan_of = lambda shares: make_plan(world, shares, micro_batch_size, min_batch)
        self.taken = []
        """This rank's samples in each completed step."""
        self.results, self.refusals = [], 0
        self.make_loop()

    def make_loop(self):
        own = self.setup, self.state, self.plan_of(self.shares), self.loader, self.commit
        engine = Engine if self.state.partition.is_whole else ShardEngine
        self.loop = Loop(self.config, self.world, *own, engine=engine)

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
        self.loader.close()

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
