"""Loops for measurements, on ranks that mpirun has started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from kaitian_mpi.balance.shares import plan_equal
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.recipes.datasets import load_data
from kaitian_mpi.recipes.image_classification import classify
from kaitian_mpi.recipes.models import build_model
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.observers import Metrics
from kaitian_mpi.train.progress import count_steps
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import Step
from kaitian_mpi.train.task import Computation


def make_config(model: str, batch: int) -> TrainConfig:
    """Return a config without progress output."""
    return TrainConfig(
        model=model,
        dataset="synthetic",
        global_batch_size=batch,
        balance="off",
        epochs=1000,
        lr=1e-4,
        log_interval=1e9,
    )


def make_loop(
    config: TrainConfig, world: World, commit: Callable[[bool], None] | None = None
) -> Loop:
    """Return a loop with equal batch sizes and its own model. Collective."""
    data = load_data(config)
    torch.manual_seed(0)
    task = classify(config, build_model(config.model, data.num_classes), data)
    setup = Setup(task, NoFolder())
    shares = plan_equal(world.size, config.global_batch_size)
    plan = Plan(shares, [1.0] * world.size, None, None)
    computation = Computation(world.device, "fp32", "channels_last")
    steps = count_steps(config, len(setup.train), config.global_batch_size)
    state = State(task, computation, steps)
    loader = ShareLoader(setup.train, config.workers, pin_memory=False)
    loop = Loop(config, world, setup, state, plan, loader, commit)
    balancing = Balancing(config, loop, setup.folder, Sinks())
    run = SimpleNamespace(config=config, setup=setup, state=state, sinks=Sinks())
    loop.observers += [balancing, Metrics(run, loop, balancing, {})]
    return loop


def endless(loop: Loop) -> Iterator[Step]:
    """Train one step per iteration, epoch after epoch."""
    while True:
        while (parts := loop.fetch()) is not None:
            step = loop.train(parts)
            loop.step_done(step)
            yield step
        for observer in loop.observers:
            observer.epoch_ends()
        loop.progress.epoch_done(epochs=10**9)


def timed(world: World, steps: Iterator[Step], count: int) -> float:
    """Return the slowest rank's seconds per step over the next `count` steps. Collective."""
    sleeping_barrier(world.comm)
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    return max(gather_values(world.comm, time.perf_counter() - began)) / count
