"""What a step changes in the state: the learning rates before it, everything else after it."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Task


def set_learning_rates(
    config: TrainingConfig, state: State, samples: int, epoch_samples: int
) -> None:
    """Let the schedulers set the learning rates of the next step. Not collective.

    Args:
        config: the run's epochs and steps.
        state: whose schedulers and optimizers.
        samples: samples in that step.
        epoch_samples: samples in an epoch.
    """
    progress = state.progress
    for scheduler in state.schedulers:
        if hasattr(scheduler, "before_step"):
            scheduler.before_step(progress.fraction_done(config, samples, epoch_samples))
    progress.learning_rate = float(state.optimizers[0].param_groups[0]["lr"])


def apply_step(task: Task, state: State, is_finite: bool, samples: int) -> None:
    """Apply a step to the state; every rank does so with the same gradient. Not collective.

    Args:
        task: how gradients are clipped.
        state: with the sums of the gradients, which are used up.
        is_finite: whether these are finite; if not, the weights stay as they are.
        samples: samples in the step, of all ranks.
    """
    scaler = state.computation.scaler
    with state.lock:
        optimizers = state.optimizers
        if scaler.is_enabled():  # it accepts none without a gradient
            optimizers = [each for each in optimizers if _has_gradient(each)]
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if is_finite:
            if task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(state.model.parameters(), task.clip_norm)
            for optimizer in optimizers:
                scaler.step(optimizer)
            state.residuals.keep()
            for scheduler in state.schedulers:
                if hasattr(scheduler, "step"):
                    scheduler.step()
        if optimizers:
            scaler.update()
        state.zero_gradients()
        state.progress.step_done(samples)


def _has_gradient(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(parameter.grad is not None for group in groups for parameter in group["params"])
