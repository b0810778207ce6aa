"""Forward, loss, optimizer and learning rate: shared by the benchmark and the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi.config import TrainConfig

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass
class Computation:
    """Forward pass, loss and update on one device, in one precision and memory format."""

    device: torch.device
    precision: str
    memory_format: str
    label_smoothing: float
    scaler: torch.amp.GradScaler = field(init=False)
    """Scales the loss with fp16; disabled with other precisions."""

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device.

        The weights stay contiguous, because DDP needs the same strides on every rank. The memory
        format of the images alone decides which convolution kernels run, at the same speed.
        """
        return model.to(self.device)

    def place(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Move a batch to the device, images in the memory format."""
        inputs = inputs.to(self.device, non_blocking=True)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=MEMORY_FORMATS[self.memory_format])
        return inputs, labels.to(self.device, non_blocking=True)

    def logits(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Run the model under autocast; return its output in float32 (float64 stays)."""
        dtype = _AUTOCAST_DTYPES.get(self.precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            outputs = model(inputs)
        return outputs if outputs.dtype == torch.float64 else outputs.float()

    def loss(self, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the batch."""
        logits = self.logits(model, inputs)
        return functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients; with fp16, skip the step where they overflowed.

        The reduced gradients are the same on every rank, so either all ranks skip or none does.
        """
        self.scaler.step(optimizer)
        self.scaler.update()


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.SGD:
    """Return SGD with momentum; weight decay applies to weight matrices and filters only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def make_schedule(config: TrainConfig) -> Callable[[float], float]:
    """Return the learning rate as a function of the fraction of the run that is done, 0 to 1.

    It rises linearly during the first `config.warmup` of the run, then stays constant or falls to 0
    along a half cosine (Loshchilov and Hutter, 2016, arXiv 1608.03983).
    """
    import math

    def rate(progress: float) -> float:
        if progress < config.warmup:
            return config.lr * progress / config.warmup
        if config.schedule == "constant":
            return config.lr
        done = min(1.0, (progress - config.warmup) / (1.0 - config.warmup))
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))

    return rate
