"""Layout pipeline trains as one process does, whoever computes which layers."""

import copy
import itertools

import pytest
import torch
from samples import BATCH, Points
from test_shards import alone
from torch import nn

from kaitian_mpi.balance.pipeline import PipelinePlan, Stage
from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.pipeline.chain import chain_of
from kaitian_mpi.train.pipeline.loop import PipelineLoop
from kaitian_mpi.train.pipeline.stages import Stages
from kaitian_mpi.train.progress import count_steps
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Computation, Task

pytestmark = pytest.mark.sizes(1, 2, 3)

STEPS = 20
LOSS = nn.CrossEntropyLoss()


class Tied(nn.Module):
    """Shares the weight of its first layer with its last."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return x @ self.first.weight


def make_task(is_tied=False, **parts):
    torch.manual_seed(5)
    first = nn.Linear(3, 40)
    layers = [first, nn.Tanh(), nn.Linear(40, 40), nn.ReLU(inplace=True), nn.Linear(40, 40)]
    layers += [Tied(first), nn.Linear(3, 4)] if is_tied else [nn.Linear(40, 4)]
    usual = {
        "model": nn.Sequential(*layers).double(),
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        "data": Points(),
        "loss": lambda m, batch: LOSS(m(batch[0]), batch[1]),
        "clip_norm": 0.5,
        "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.98),
    }
    return Task(**{**usual, **parts})


def plan_of(world, task, micro_batch, replicas=1):
    """Split the layers over the ranks, the last stage having so many of them."""
    layers, size = len(chain_of(task)), world.size
    alone_in_stage = max(0, size - replicas)
    ends = [1 + i * (layers - 1) // size for i in range(alone_in_stage)]
    begins = [0, *ends]
    ranks = [(rank,) for rank in range(alone_in_stage)] + [tuple(range(alone_in_stage, size))]
    stages = tuple(
        Stage(begin, end, own, tuple(1.0 + rank for rank in own))
        for begin, end, own in zip(begins, [*ends, layers], ranks, strict=True)
    )
    return PipelinePlan(stages, micro_batch)


class Run:
    """A pipeline's run, loop by loop."""

    def __init__(self, world, task, plan, **settings):
        self.world, self.task = world, task
        settings = {"log_interval": 60, "epochs": 9, "layout": "pipeline", **settings}
        self.config = TrainConfig(global_batch_size=BATCH, **settings)
        self.setup = Setup(task, NoFolder())
        steps = count_steps(self.config, len(self.setup.train), BATCH, 1)
        computation = Computation(world.device, "fp32", "contiguous")
        self.state = State(task, computation, steps)
        chain = chain_of(task)
        self.state.shards = Stages(task.model, self.state.optimizers, chain, world.device)
        self.loader = ShareLoader(self.setup.train, 0, pin_memory=False)
        self.make_loop(plan)

    def make_loop(self, pipeline):
        world = self.world
        self.state.shards.assign_stages(world, pipeline.stages)
        sizes = split_micro_batches(BATCH, pipeline.micro_batch)
        batch_sizes = pipeline.first_samples(sizes, world.size)
        plan = Plan(batch_sizes, [1.0] * world.size, None, None, pipeline=pipeline)
        own = self.setup, self.state, plan, self.loader
        self.loop = PipelineLoop(self.config, world, *own)

    def epoch(self):
        """Yield each step with its samples."""
        while True:
            begin = self.state.progress.position
            if (parts := self.loop.fetch()) is None:
                break
            step = self.loop.train(parts)
            yield step, self.loop.sampler.indices(begin, step.samples)

    def close(self):
        self.loop.close()
        self.loader.close()


def compare_with_one_process(run, initial, taken, losses, tmp_path):
    data = run.setup.train
    task = Task(**{**vars(run.task), "model": initial})
    expected, optimizers = alone(task, [data[indices] for indices in taken])
    with run.state.shards.collected(run.world, tmp_path):
        shared = run.state.shared()
    if run.world.rank == 0:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(shared["model"][name], value, rtol=1e-10, atol=1e-10)
        own = shared["optimizers"][0]["state"]
        for number, state in optimizers[0].state_dict()["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(own[number][name], value, rtol=1e-10, atol=1e-10)
    return losses


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("micro_batch", "replicas"), [(5, 1), (24, 1), (2, 2)])
def test_twenty_steps_are_those_of_one_process(world, tmp_path, is_tied, micro_batch, replicas):
    task = make_task(is_tied)
    initial = copy.deepcopy(task.model)
    run = Run(world, task, plan_of(world, task, micro_batch, replicas))
    taken, losses = [], []
    while len(taken) < STEPS:
        for step, indices in itertools.islice(run.epoch(), STEPS - len(taken)):
            taken.append(indices)
            losses.append(step.loss)
        run.state.progress.epoch_done(9)
    run.close()
    compare_with_one_process(run, initial, taken, losses, tmp_path)
