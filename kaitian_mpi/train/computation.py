"""Forward, loss, optimizer and learning rate: shared by the benchmark and the training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.batches import place
from kaitian_mpi.train.task import Task

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass
class Computation:
    """Forward and loss on one device, in one precision and memory layout."""

    device: torch.device
    precision: str
    memory_format: str
    scaler: torch.amp.GradScaler = field(init=False)
    """Scales the loss with fp16; disabled with other precisions."""

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device.

        Its weights keep the plain layout, which must be the same on every rank; the layout of the
        images alone decides by which kernels a convolution runs, at the same speed.
        """
        return model.to(self.device)

    def place(self, batch: Any) -> Any:
        """Move a batch to the device, images in the memory format."""
        return place(batch, self.device, MEMORY_FORMATS[self.memory_format])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute a forward and a loss, in the precision."""
        dtype = _AUTOCAST_DTYPES.get(self.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def loss(
        self, task: Task, model: nn.Module, batch: Any, needs_gradient: bool = True
    ) -> torch.Tensor:
        """Return the task's mean loss over a batch that is on the device."""
        assert task.loss is not None
        with self.autocast():
            return check_loss(task.loss(model, batch), needs_gradient)


def check_loss(loss: Any, needs_gradient: bool = True) -> torch.Tensor:
    """Check a loss; return it as a float32 or float64 tensor without dimensions."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            found = f"a tensor of shape {list(loss.shape)}"
        raise UserError(
            f"the loss is {found}; it must be a tensor of one element, the mean over the batch"
        )
    if needs_gradient and torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(
            "the loss has no gradient; compute it from the model's parameters, without no_grad or "
            "detach"
        )
    loss = loss.reshape(())
    return loss if loss.dtype == torch.float64 else loss.float()
