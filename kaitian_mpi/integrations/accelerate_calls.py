"""Calls of Accelerate that expect equal batches, or a training before an evaluation."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import operations
from torch import nn


def extend_accelerate() -> Callable[[], None]:
    """Extend Accelerate's calls; return what ends that."""
    restores = _gather_unequal_rows(), _wrap_evaluated_models()

    def restore() -> None:
        for restore_call in restores:
            restore_call()

    return restore


def _gather_unequal_rows() -> Callable[[], None]:
    """Make `gather` return the rows of all ranks, however many each has.

    Trainers, such as TRL's of preferences, gather values by row for what they log; Accelerate
    expects as many rows on each rank (utils/operations.py, `_gpu_gather`).
    """
    gather = operations._gpu_gather

    def gather_rows(tensor: torch.Tensor) -> Any:
        if not tensor.dim():
            return gather(tensor)
        count = torch.tensor([len(tensor)], device=tensor.device)
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, count)
        rows = torch.cat(counts).tolist()
        if len(set(rows)) == 1:
            return gather(tensor)
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = gather(padded).split(max(rows))
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    @functools.wraps(gather)
    def gather_all(tensor: Any) -> Any:
        return operations.recursively_apply(gather_rows, tensor, error_on_other_type=True)

    def restore() -> None:
        operations._gpu_gather = gather

    operations._gpu_gather = gather_all
    return restore


def _wrap_evaluated_models() -> Callable[[], None]:
    """Let a model be wrapped in DDP for its training after it was prepared for an evaluation.

    Else Accelerate returns it as it is, and each rank would train alone (accelerator.py,
    `_is_accelerate_prepared`): as after `Trainer.evaluate()` before `train()`.
    """
    prepare = Accelerator.prepare_model
    evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @functools.wraps(prepare)
    def prepare_model(
        self: Accelerator, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        if model in evaluated and not evaluation_mode:
            evaluated.discard(model)
            vars(model).pop("_is_accelerate_prepared", None)
            if "_original_forward" in vars(model):  # without autocast, which is added again
                model.forward = vars(model).pop("_original_forward")
            self._models[:] = [other for other in self._models if other is not model]
        prepared = prepare(self, model, device_placement, evaluation_mode)
        if evaluation_mode and prepared is model:
            evaluated.add(model)
        return prepared

    def restore() -> None:
        Accelerator.prepare_model = prepare  # type: ignore[method-assign]

    Accelerator.prepare_model = prepare_model  # type: ignore[method-assign]
    return restore
