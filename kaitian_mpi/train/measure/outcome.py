"""One forward and backward of a task on a copy of its model, for the parity check."""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.measure.repeatable import Repeatable, switch_off_dropout
from kaitian_mpi.train.task import Task

_MAX_OUTPUTS = 1 << 16
_MIN_SCALE, _SCALE_STEP = 2.0**4, 2.0**-4
# Sums of hundreds of products round more than a single operation.
_SUM_FACTOR = 16.0
# Of autocast, whose sums are float32; and of convolutions in "fp32" on accelerators, whose TF32 or
# HF32 has 11 bits.
_UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
_TENSOR_CORE_UNIT = 2.0**-11
_MATMUL_UNITS = {"high": 2.0**-11, "medium": 2.0**-8}


@dataclass(frozen=True)
class Outcome:
    """The result of a forward and backward: flat tensors in host memory."""

    loss: float
    outputs: torch.Tensor
    """Of the model, at most 65,536 of them."""
    gradients: dict[str, torch.Tensor]
    """Of each parameter; zeros if it has got none."""
    buffers: dict[str, torch.Tensor]
    """What was added to each buffer, such as a batch norm's statistics."""
    levels: dict[str, float]
    """How large a typical number of each buffer's module is: the mean of a batch may be zero, and
    is rounded as its variance is."""


def compute_outcome(
    task: Task,
    batch: Any,
    computation: Computation,
    seed: int,
    dtype: torch.dtype | None = None,
    change: float = 0.0,
) -> Outcome:
    """Return what the task's model makes of a batch, without dropout. Not collective.

    The model itself, its buffers and torch's random numbers stay as they are.

    Args:
        task: its model and loss.
        batch: on the host.
        computation: on which device and how.
        seed: of the random numbers.
        dtype: of the parameters and of the batch's floating-point tensors; None: as they are.
        change: the largest relative change, at random, of each parameter and number of the batch.
    """
    device = computation.device
    devices = [] if device_of(device).is_host else [device]
    with torch.random.fork_rng(devices, device_type=device.type), local_statistics():
        model = copy.deepcopy(task.model).to(device).train()
        switch_off_dropout(model)
        if dtype is not None:
            model = model.to(dtype)
            batch = map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
        if change:
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(_changed(parameter, change))
            batch = map_tensors(batch, lambda tensor: _changed(tensor, change))
        with _eager() if dtype is not None else nullcontext():
            return _compute(task, model, computation.place(batch), computation, seed)


def _changed(tensor: torch.Tensor, change: float) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return tensor
    return tensor * (1 + change * (2 * torch.rand(tensor.shape) - 1)).to(tensor)


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled, for what is computed in this way only once."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _compute(
    task: Task, model: nn.Module, batch: Any, computation: Computation, seed: int
) -> Outcome:
    """Compute once; with fp16, again with smaller scales of the loss until nothing overflows."""
    scale = computation.scaler.get_scale() if computation.scaler.is_enabled() else 1.0
    before = [buffer.clone() for buffer in model.buffers()] if scale > 1 else []
    own = dict(task.model.named_parameters())
    outputs: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        outputs.append(_sample(tensor))
        return tensor

    def collect(_: nn.Module, __: Any, output: Any) -> None:
        with suppress(Exception):  # of an output that holds its tensors in a way of its own
            map_tensors(output, keep)

    model.register_forward_hook(collect)
    while True:
        outputs.clear()
        torch.manual_seed(seed)
        with Repeatable():
            loss = computation.loss(task, model, batch, needs_gradient=False)
        if loss.requires_grad:  # not of a batch in which nothing counts
            (loss * scale).backward()
        gradients = {
            name: torch.zeros(size_of(own[name]), dtype=torch.float64)
            if parameter.grad is None
            else _flat(parameter.grad) / scale
            for name, parameter in model.named_parameters()
        }
        if scale <= _MIN_SCALE or all(bool(each.isfinite().all()) for each in gradients.values()):
            break
        scale *= _SCALE_STEP
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
    kept = {name: each.to(_kept_in(own[name])) for name, each in gradients.items()}
    found = torch.cat(outputs) if outputs else torch.zeros(0, dtype=torch.float64)
    return Outcome(loss.item(), found[:_MAX_OUTPUTS], kept, *_changes(task.model, model))


def size_of(tensor: torch.Tensor) -> int:
    """Return how many real numbers a parameter's gradient, or a buffer's change, has."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _kept_in(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten()
    return _flat(flat[:: max(1, flat.numel() // _MAX_OUTPUTS)])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
    parts = torch.view_as_real(dense) if dense.is_complex() else dense
    return parts.to("cpu").double().flatten()


def _changes(
    before: nn.Module, after: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return what was added to each buffer, and their levels."""
    changes, levels = {}, dict.fromkeys((name for name, _ in before.named_buffers()), 0.0)
    now = dict(after.named_buffers())
    for name, own in before.named_buffers():
        buffer = now.get(name)
        if buffer is None or buffer.shape != own.shape or buffer.layout is not torch.strided:
            changes[name] = torch.zeros(size_of(own), dtype=torch.float64)
            continue  # such as a cache that this forward has made
        changes[name] = _flat(buffer) - _flat(own)
        if buffer.is_floating_point() and buffer.numel():
            module = name.rpartition(".")[0]
            rms = float(_flat(buffer).square().mean().sqrt())
            for other in levels:
                if other.rpartition(".")[0] == module:
                    levels[other] = max(levels[other], rms)
    return changes, levels


def rounding_unit(model: nn.Module, computation: Computation) -> float:
    """Return the relative error of a rank's coarsest operation, such as 2^-20 in float32."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    eps = [torch.finfo(dtype).eps for dtype in dtypes]
    unit = max([e / 2 * (_SUM_FACTOR if e < _TENSOR_CORE_UNIT else 1.0) for e in eps], default=0.0)
    if torch.float32 in dtypes:
        is_host = device_of(computation.device).is_host
        unit = max(
            unit,
            _UNITS.get(computation.precision, 0.0 if is_host else _TENSOR_CORE_UNIT),
            _MATMUL_UNITS.get(torch.get_float32_matmul_precision(), 0.0),
        )
    return unit
