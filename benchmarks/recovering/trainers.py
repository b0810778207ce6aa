"""Loops for measurements, on ranks that mpirun has started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from shared.loops import LoopMaker

from kaitian_mpi.balance.shares import plan_equal
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.recipes.datasets import load_data
from kaitian_mpi.recipes.image_classification import classify
from kaitian_mpi.recipes.models import build_model
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.observers import Metrics
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.step import Step


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
    maker = LoopMaker(config, world, task, memory_format="channels_last")
    shares = plan_equal(world.size, config.global_batch_size)
    loop = maker.make(Plan(shares, [1.0] * world.size, None, None), commit)
    balancing = Balancing(config, loop, maker.setup.folder, Sinks())
    run = SimpleNamespace(config=config, setup=maker.setup, state=maker.state, sinks=Sinks())
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
