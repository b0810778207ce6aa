"""Losses that Hugging Face's Trainer logs: means over the rows of all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import warn_rank_0


def weight_losses(weight: Callable[[], float], is_mean: Callable[[], bool], world: World) -> None:
    """Make the Trainer log means over the rows of all ranks, if batches are unequal.

    The Trainer averages the ranks' losses (trainer.py, `_maybe_log_save_evaluate`); so a rank's
    loss is weighted as its gradient is. The `train_loss` at its end is rank 0's since the last
    logged step; it is replaced by the mean of the ranks.
    """
    if hasattr(Trainer.training_step, "weighted"):
        return
    compute, log = Trainer.training_step, Trainer.log
    # Of each Trainer that trains: its first step, and the sum of its losses.
    sums: weakref.WeakKeyDictionary[Trainer, tuple[int, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(compute)
    def training_step(trainer: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = trainer.state.global_step
        if trainer not in sums and not trainer.args.average_tokens_across_devices:
            raise AgreedError(
                "--adaptive requires the mean over the labels of all ranks, and this Trainer "
                "takes that of each rank; set average_tokens_across_devices=True"
            )
        loss = compute(trainer, *args, **kwargs) * weight()
        if trainer not in sums and is_mean() and _multiplies_by_ranks(trainer, *args):
            warn_rank_0(
                world,
                "adaptive: this Trainer multiplies the model's loss, a mean, by the number of "
                "ranks, as it does with equal batches (transformers#48690)",
            )
        first, total = sums.get(trainer, (before, 0.0))
        sums[trainer] = first, total + loss
        return loss

    @functools.wraps(log)
    def log_mean(trainer: Trainer, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "train_loss" in logs and trainer in sums:
            first, total = sums.pop(trainer)
            dist.all_reduce(total)
            steps = max(trainer.state.global_step - first, 1)
            logs["train_loss"] = float(total) / dist.get_world_size() / steps
        log(trainer, logs, *args, **kwargs)

    vars(training_step)["weighted"] = True
    Trainer.training_step = training_step  # type: ignore[assignment, method-assign]
    Trainer.log = log_mean  # type: ignore[assignment, method-assign]


def _multiplies_by_ranks(trainer: Trainer, model: Any, inputs: Any, items: Any = None) -> bool:
    """Return whether `compute_loss` takes the model's loss for a sum over labels."""
    return items is not None and bool(trainer.model_accepts_loss_kwargs)
