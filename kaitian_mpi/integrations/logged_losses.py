"""Losses that Hugging Face's Trainer logs: means over the rows of all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import Trainer

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.losses import SUM
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import warn_rank_0


class Weights(Protocol):
    """What is known of the latest batch."""

    world: World
    rule: str
    weight: Callable[[], float]
    counts_items: bool


def weight_losses(weights: Weights) -> None:
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
        items = kwargs.get("num_items_in_batch", args[2] if len(args) > 2 else None)
        weights.counts_items = items is not None
        loss = compute(trainer, *args, **kwargs) * weights.weight()
        multiplies = weights.counts_items and trainer.model_accepts_loss_kwargs
        if trainer not in sums and weights.rule != SUM and multiplies:
            warn_rank_0(
                weights.world,
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
