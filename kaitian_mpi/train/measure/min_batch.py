"""Finds the smallest batch that a model can train on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, Task


def find_min_batch(config: TrainingConfig, world: World, setup: Setup) -> int:
    """Return the fewest samples that every rank can train the model on, 1 or 2. Collective.

    Batch norm over a single value per sample and channel raises for one sample, and similar layers
    return NaN. This is tested with the loss of a copy of the model; if the task has no loss, a
    model with batch norm is taken for such.
    """
    precision = "fp32" if config.precision == "auto" else config.precision
    computation = Computation(world.device, precision, "contiguous")
    enter_phase("a trial of the model")
    own = min_batch_of(setup.task, setup.train, computation)
    enter_phase("waiting for the other ranks' trial of the model", waits=True, limited=False)
    found = max(gather_values(world.comm, own))
    why = "the model cannot train on a single sample"
    if found > 1:
        print_rank_0(world, f"{why}: no rank takes fewer than {found}")
    if len(setup.train) < found:
        raise AgreedError(f"--dataset has {len(setup.train)} sample, but {why}; give it more")
    if 0 < config.micro_batch_size < found:
        raise AgreedError(f"--micro-batch-size must be at least {found}: {why}")
    return found


def min_batch_of(task: Task, data: Any, computation: Computation) -> int:
    """Return the fewest samples that this rank can train the model on, 1 or 2.

    Returns 1 for a model that fails with two samples as well: training will report its error.
    """
    if task.loss is None:
        return 1 + any(isinstance(module, _BatchNorm) for module in task.model.modules())
    with torch.random.fork_rng(devices=[]), torch.no_grad(), local_statistics():
        try:
            trial = copy.deepcopy(task.model).to(computation.device).train()
        except Exception:  # user code may raise anything
            return 1
        if _works(task, trial, data, [0], computation):
            return 1
        return 2 if _works(task, trial, data, [0, len(data) - 1], computation) else 1


def _works(
    task: Task, model: nn.Module, data: Any, indices: Sequence[int], computation: Computation
) -> bool:
    try:
        batch = data[indices]
        weight = task.weigh(batch, len(indices))
        loss = computation.loss(task, model, computation.place(batch))
        # The mean of nothing is NaN, whatever the model. A device reports its errors when it is
        # read.
        return bool(loss.isfinite()) or not weight
    except Exception:  # as above
        return False
