"""Image classification by cross-entropy: the training of `kaitian-train --model`."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.config.factory import one_line
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.recipes.data_source import DataSource
from kaitian_mpi.recipes.datasets import load_data
from kaitian_mpi.recipes.models import ImageClassifier, build_model
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs [n, ...] and classes, int64 [n]."""


def make_task(config: TrainConfig, world: World) -> Task:
    """Load the data and build the model. Collective."""
    with agree_on_errors(world.comm):
        enter_phase("loading the dataset (--dataset)")
        torch.manual_seed(config.seed)  # so that random data is the same on every rank
        source = load_data(config)
        enter_phase("waiting for the other ranks' data", waits=True, limited=False)
    if ":" in config.dataset:
        from kaitian_mpi.recipes.class_count import count_classes

        source = count_classes(config.dataset, source, world)
    torch.manual_seed(config.seed)
    enter_phase("building the model (--model)")
    model = build_model(config.model, source.num_classes)
    check_inputs(config, model, source)
    return classify(config, model, source)


@torch.no_grad()
def check_inputs(config: TrainConfig, model: nn.Module, source: DataSource) -> None:
    """Raise a `UserError` if the inputs are uint8, and the model does not convert them."""
    inputs, _ = source.train[[0]]
    if inputs.dtype != torch.uint8:
        return
    try:
        model.eval()(inputs)
    except RuntimeError as error:
        raise UserError(
            f"--dataset {config.dataset}: its inputs are uint8, with which --model {config.model} "
            f"cannot compute ({one_line(error)}); return floating-point tensors, such as "
            "picture / 255, or convert them in the model"
        ) from error
    model.train()


def classify(config: TrainConfig, model: nn.Module, source: DataSource) -> Task:
    """Return the task of classifying with a model."""
    return Task(
        name=config.model,
        model=model,
        layers=model.in_order if isinstance(model, ImageClassifier) else None,
        data=source.train,
        validation=source.validation,
        loss=partial(cross_entropy, label_smoothing=config.label_smoothing),
        metrics=count_right,
        optimizer=partial(make_optimizer, config),
        clip_norm=config.clip_norm or None,
        scheduler=partial(Schedule, config),
    )


def cross_entropy(model: nn.Module, batch: Batch, label_smoothing: float) -> torch.Tensor:
    """Return the mean cross-entropy of a batch."""
    inputs, labels = batch
    return functional.cross_entropy(logits(model, inputs), labels, label_smoothing=label_smoothing)


def count_right(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the sum of the cross-entropies, and the number of samples classified correctly."""
    inputs, labels = batch
    outputs = logits(model, inputs)
    return {
        "loss": functional.cross_entropy(outputs, labels, reduction="sum"),
        "accuracy": (outputs.argmax(1) == labels).sum(),
    }


def logits(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Run the model; return its output as float32 (float64 stays)."""
    outputs = model(inputs)
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of `--optimizer`; weight decay on matrices and filters only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


class Schedule:
    """Sets the learning rate by the fraction of the run that is done.

    It rises linearly in the first `config.warmup` of the run, then stays or falls as a half cosine
    to 0 (Loshchilov and Hutter, 2016, arXiv 1608.03983). It has no state of its own, so that a
    resumed run follows the flags of its own job.
    """

    def __init__(self, config: TrainConfig, optimizer: torch.optim.Optimizer) -> None:
        self._config = config
        self._optimizer = optimizer

    def rate(self, progress: float) -> float:
        """Return the learning rate."""
        config = self._config
        if progress < config.warmup:
            return config.lr * progress / config.warmup
        if config.schedule == "constant":
            return config.lr
        done = min(1.0, (progress - config.warmup) / (1.0 - config.warmup))
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))

    def before_step(self, fraction: float) -> None:
        """Set the learning rate of the next step."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate(fraction)
