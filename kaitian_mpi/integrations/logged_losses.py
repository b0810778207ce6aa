"""Losses of Hugging Face's Trainer: how they depend on rows, and their means over all ranks."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers import trainer as trainer_module
from transformers.trainer_utils import TrainOutput

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.losses import MAX_DEVIATION, SUM, Rule, compare_parts, evaluating
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import warn_rank_0


class Weights(Protocol):
    """What is known of the latest batch."""

    world: World
    rule: Rule
    weight: Callable[[], float]
    trainer_rules: list[Rule] | None
    trainer_inputs: Mapping[str, Any]
    counts_items: bool

    def step_of(self, inputs: Any) -> AbstractContextManager[None]:
        """Let all forwards have the batch of these inputs, the next that its trainer has taken."""


def weight_losses(weights: Weights) -> None:
    """Make the Trainer's gradients and what it logs means over the rows of all ranks.

    Its own loss decides, not the model's: a subclass, such as TRL's, may compute another one. The
    Trainer averages the ranks' losses (trainer.py, `_maybe_log_save_evaluate`); so a rank's
    loss is weighted as its gradient is. The `train_loss` at its end is rank 0's since the last
    logged step; it is replaced by the mean of the ranks.
    """
    if hasattr(Trainer.training_step, "weighted"):
        return
    compute, log = Trainer.training_step, Trainer.log
    # Of each Trainer that trains: its first step, and the sum of its losses.
    sums: weakref.WeakKeyDictionary[Trainer, tuple[int, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(compute)
    def training_step(
        trainer: Trainer, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        before = trainer.state.global_step
        if trainer not in sums and not trainer.args.average_tokens_across_devices:
            raise AgreedError(
                "--adaptive requires the mean over the labels of all ranks, and this Trainer "
                "takes that of each rank; set average_tokens_across_devices=True"
            )
        items = kwargs.get("num_items_in_batch", args[0] if args else None)
        weights.counts_items = items is not None
        weights.trainer_inputs = dict(inputs)
        if trainer not in sums:
            weights.trainer_rules = _find_trainer_rules(trainer, inputs, items)
        with weights.step_of(inputs):
            loss = compute(trainer, model, inputs, *args, **kwargs) * weights.weight()
        is_own = type(trainer).compute_loss is not Trainer.compute_loss
        multiplies = weights.counts_items and trainer.model_accepts_loss_kwargs and not is_own
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
            weights.trainer_rules = None
            logs["train_loss"] = float(total) / dist.get_world_size() / steps
        log(trainer, logs, *args, **kwargs)

    def output(step: int, loss: float, metrics: dict[str, float]) -> TrainOutput:
        return TrainOutput(step, metrics.get("train_loss", loss), metrics)

    vars(training_step)["weighted"] = True
    vars(trainer_module)["TrainOutput"] = output  # what `train` returns, from its last log
    Trainer.training_step = training_step  # type: ignore[assignment, method-assign]
    Trainer.log = log_mean  # type: ignore[assignment, method-assign]


def _find_trainer_rules(
    trainer: Trainer, inputs: Mapping[str, Any], items: Any
) -> list[Rule] | None:
    """Return how the loss that a Trainer computes may depend on the rows of its first batch.

    If it is half with twice as many `items`, the labels of all ranks, it is a sum over rows that
    the Trainer divides by them. Without labels, returns None: not known. Collective, as the
    Trainer's own metrics may be.
    """
    if "labels" not in inputs:
        return None
    inputs = trainer._prepare_inputs(dict(inputs))
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))  # of TRL
    model: Any = trainer.model

    def compute(_: Any, inputs: Mapping[str, Any], items: Any = items) -> torch.Tensor:
        with trainer.compute_loss_context_manager():
            loss: Any = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
        return loss

    try:
        if items is not None:
            with evaluating(model, inputs["labels"]):
                loss, half = (float(compute((), inputs, count)) for count in (items, items * 2))
            if abs(half * 2 - loss) <= MAX_DEVIATION * abs(loss):
                return [SUM]
        return compare_parts(model, compute, (), inputs)
    finally:
        if metrics is not None:
            vars(trainer)["_metrics"] = metrics
