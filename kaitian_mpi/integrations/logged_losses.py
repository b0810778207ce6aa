"""Losses of Hugging Face's Trainer: how they depend on rows, and their means over all ranks."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers import trainer as trainer_module
from transformers.trainer_utils import TrainOutput

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.loss_weights import Loss
from kaitian_mpi.integrations.losses import (
    MAX_DEVIATION,
    SUM,
    Rule,
    compare_parts,
    evaluating,
    labels_in,
)
from kaitian_mpi.integrations.output_weights import OutputWeights
from kaitian_mpi.integrations.rank_means import means_over_rows
from kaitian_mpi.integrations.taken_batches import BatchRows
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import warn_rank_0


class _Training:
    """A Trainer that trains, and the sum of its losses."""

    def __init__(self, first_step: int, loss: Loss | None) -> None:
        self.first_step = first_step
        self.loss = loss
        """The loss that the Trainer computes; None without labels: the model's outputs decide."""
        self.sum: Any = 0.0
        """The sum of the steps' losses, weighted as their gradients are."""


Trainings = weakref.WeakKeyDictionary[Trainer, _Training]
StepOf = Callable[[Any], AbstractContextManager[BatchRows | None]]
"""Returns the context of a step on these inputs, which yields the batch's rows."""


def weight_losses(weights: OutputWeights, step_of: StepOf) -> None:
    """Make the Trainer's gradients and logged losses means over the rows of all ranks.

    Its own loss decides, not the model's: a subclass, such as TRL's, may compute another one. The
    Trainer averages the ranks' losses (trainer.py, `_maybe_log_save_evaluate`); so a rank's
    loss is weighted as its gradient is. The `train_loss` at its end is rank 0's since the last
    logged step; it is replaced by the mean of the ranks.

    Args:
        weights: of the gradients.
        step_of: the context of a step.
    """
    if hasattr(Trainer.training_step, "weighted"):
        return
    trainings: Trainings = weakref.WeakKeyDictionary()
    training_step: Any = _training_step(Trainer.training_step, trainings, weights, step_of)
    vars(training_step)["weighted"] = True
    log: Any = _log(Trainer.log, trainings, weights)
    vars(trainer_module)["TrainOutput"] = _output  # what `train` returns, from its last log
    Trainer.training_step = training_step  # type: ignore[method-assign]
    Trainer.log = log  # type: ignore[method-assign]


def _training_step(
    stock: Any, trainings: Trainings, weights: OutputWeights, step_of: StepOf
) -> Any:
    @functools.wraps(stock)
    def training_step(
        trainer: Trainer, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        items = kwargs.get("num_items_in_batch", args[0] if args else None)
        is_first = trainer not in trainings
        if is_first:
            loss = weights.new_loss("Trainer") if "labels" in inputs else None
            trainings[trainer] = _begin(trainer, loss)
        training = trainings[trainer]
        labels = labels_in((), inputs)
        weights.set_trainer_loss(training.loss, labels)
        if training.loss is not None:
            training.loss.set_counts_stand_ins(items is not None)
            find_rules = functools.partial(_find_rules, trainer, inputs, items)
            training.loss.observe(labels, find_rules, together=True)
        with step_of(inputs) as rows, means_over_rows(rows):
            mean: torch.Tensor = stock(trainer, model, inputs, *args, **kwargs) * weights.latest()
        if is_first and training.loss is not None and training.loss.rule != SUM:
            _warn_if_multiplied(weights.world, trainer, items)
        training.sum = training.sum + mean
        return mean

    return training_step


def _log(stock: Any, trainings: Trainings, weights: OutputWeights) -> Any:
    @functools.wraps(stock)
    def log_mean(trainer: Trainer, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "train_loss" in logs and trainer in trainings:
            training = trainings.pop(trainer)
            dist.all_reduce(training.sum)
            steps = max(trainer.state.global_step - training.first_step, 1)
            weights.set_trainer_loss(None, {})
            logs["train_loss"] = float(training.sum) / dist.get_world_size() / steps
        stock(trainer, logs, *args, **kwargs)

    return log_mean


def _output(step: int, loss: float, metrics: dict[str, float]) -> TrainOutput:
    return TrainOutput(step, metrics.get("train_loss", loss), metrics)


def _begin(trainer: Trainer, loss: Loss | None) -> _Training:
    if not trainer.args.average_tokens_across_devices:
        raise AgreedError(
            "--adaptive requires the mean over the labels of all ranks, and this Trainer takes "
            "that of each rank; set average_tokens_across_devices=True"
        )
    return _Training(trainer.state.global_step, loss)


def _warn_if_multiplied(world: World, trainer: Trainer, items: Any) -> None:
    is_subclass_loss = type(trainer).compute_loss is not Trainer.compute_loss
    if items is not None and trainer.model_accepts_loss_kwargs and not is_subclass_loss:
        warn_rank_0(
            world,
            "adaptive: this Trainer multiplies the model's loss, a mean, by the number of "
            "ranks, as it does with equal batches (transformers#48690)",
        )


def _find_rules(trainer: Trainer, inputs: Mapping[str, Any], items: Any) -> list[Rule]:
    """Return the rules by which a Trainer's loss may depend on the rows of a batch.

    If it is half with twice as many `items`, the labels of all ranks, it is a sum over rows that
    the Trainer divides by them. Collective, as the Trainer's own metrics may be.
    """
    inputs = trainer._prepare_inputs(dict(inputs))
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))  # of TRL
    model: Any = trainer.model

    def compute(_: Any, inputs: Mapping[str, Any], items: Any = items) -> torch.Tensor:
        with trainer.compute_loss_context_manager():
            loss: Any = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
        return loss

    try:
        if items is not None:
            with evaluating(model):
                loss, half = (float(compute((), inputs, count)) for count in (items, items * 2))
            if abs(half * 2 - loss) <= MAX_DEVIATION * abs(loss):
                return [SUM]
        return compare_parts(model, compute, (), inputs)
    finally:
        if metrics is not None:
            vars(trainer)["_metrics"] = metrics
