"""One forward and backward of a task on a copy of its model, and how two of them differ."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.task import Computation, Task

LOSS, NORM, DIRECTION = "the loss", "the gradient's norm", "the gradient's direction"
STATISTICS = "the buffers"
_MAX_NUMBERS = 1 << 22  # of a gradient; of a larger one, some are compared
_LOSS_SCALES = (2.0**16, 2.0**8, 1.0)  # of fp16, until no gradient overflows
_COARSE_UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Sums of hundreds of products round more than one operation; accelerators use TF32 or the like.
_HOST_UNIT, _ACCELERATOR_UNIT, _FAST_MATMUL_UNIT = 2.0**-20, 2.0**-11, 2.0**-8
# What rounding may do in any case: a single one may switch a ReLU.
_LOSS_UNITS, _KINK = 32.0, 0.05
_TINY = 1e-300
_NOISE_FACTOR = 4.0  # how much more than small changes of weights and data rounding may do
_NONE = torch.zeros(2, 0, dtype=torch.float64)
_MAX_NORM_CHANGE = 0.9  # so that a gradient of zero is never taken for rounding


@dataclass(frozen=True)
class Outcome:
    """The result of a forward and backward: flat float64 tensors in host memory."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """Of each parameter; zeros if it has got none."""
    buffers: torch.Tensor
    """What was added to the floating-point buffers, such as batch norms' statistics."""
    buffer_norm: float
    """Of these buffers themselves, which are rounded even if they do not change."""


class _WithoutDropout(TorchFunctionMode):
    """Applies no dropout, of which devices of different kinds draw different masks."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else options["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                options["dropout_p"] = 0.0
        return func(*args, **options)


def compute_outcome(
    task: Task,
    batch: Any,
    computation: Computation,
    seed: int,
    dtype: torch.dtype | None = None,
    change: float = 0.0,
) -> Outcome | None:
    """Return what the task's model makes of a batch, without dropout. Not collective.

    The model itself, its buffers and torch's random numbers stay as they are. With a `dtype`, the
    floating-point numbers are converted; with a `change`, they are changed at random by at most
    that part. None if the loss draws random numbers, which differ between kinds of devices.
    """
    device = computation.device
    is_host = device_of(device).is_host
    eager = dtype is not None and "torch._dynamo" in sys.modules  # importing it takes a second
    with (
        torch.random.fork_rng([] if is_host else [device], device_type=device.type),
        local_statistics(),
        torch.compiler.set_stance("force_eager") if eager else nullcontext(),
    ):
        for scale in _LOSS_SCALES if computation.scaler.is_enabled() else (1.0,):
            torch.manual_seed(seed)
            model = copy.deepcopy(task.model).to(device=device, dtype=dtype).train()
            placed = computation.place(_prepare(model, batch, dtype, change))
            before = _random_state(device)
            outcome = _compute(task, model, placed, computation, scale)
            if not torch.equal(before, _random_state(device)):
                return None
            if all(bool(each.isfinite().all()) for each in outcome.gradients.values()):
                break
    return outcome


def _random_state(device: torch.device) -> torch.Tensor:
    state = device_of(device).random_state(device.index or 0)
    return torch.get_rng_state() if state is None else state


def _prepare(model: nn.Module, batch: Any, dtype: torch.dtype | None, change: float) -> Any:
    """Switch off the dropout within kernels, change the model, and return the changed batch."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        tensor = tensor.to(dtype or tensor.dtype)
        return tensor * (1 + change * (2 * torch.rand(tensor.shape) - 1)).to(tensor)

    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    with torch.no_grad():
        for parameter in model.parameters() if change else ():
            parameter.copy_(changed(parameter))
    return map_tensors(batch, changed)


def _compute(
    task: Task, model: nn.Module, batch: Any, computation: Computation, scale: float
) -> Outcome:
    with _WithoutDropout():
        loss = computation.loss(task, model, batch, needs_gradient=False)
    if loss.requires_grad:  # not of a batch in which nothing counts
        (loss * scale).backward()
    count = sum(parameter.numel() for parameter in model.parameters())
    stride = -(-count // _MAX_NUMBERS) or 1
    gradients = {
        name: _flat(torch.zeros_like(p) if p.grad is None else p.grad, stride) / scale
        for name, p in model.named_parameters()
    }
    now = dict(model.named_buffers())
    kept = [
        torch.stack([_flat(now[name]), _flat(own)])
        for name, own in task.model.named_buffers()
        if own.is_floating_point() and name in now and now[name].shape == own.shape
    ]
    after, before = torch.cat([_NONE, *kept], dim=1)
    return Outcome(loss.item(), gradients, after - before, float(after.norm()))


def _flat(tensor: torch.Tensor, stride: int = 1) -> torch.Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
    parts = torch.view_as_real(dense) if dense.is_complex() else dense
    return parts.flatten()[::stride].to("cpu").double()


def rounding_unit(model: nn.Module, computation: Computation) -> float:
    """Return the relative error of a rank's coarsest operation, such as 2^-20 in float32."""
    is_host = device_of(computation.device).is_host
    usual = _HOST_UNIT if is_host else _ACCELERATOR_UNIT
    units = [_COARSE_UNITS.get(computation.precision, usual)]
    if torch.get_float32_matmul_precision() != "highest":
        units.append(_FAST_MATMUL_UNIT)
    units += [torch.finfo(p.dtype).eps / 2 for p in model.parameters() if p.is_floating_point()]
    return max(units)


def distances(own: Outcome, reference: Outcome, unit: float) -> dict[str, float]:
    """Return how much an outcome differs from the reference, by quantity; NaN where it is NaN."""
    pairs = [(own.gradients[name], other) for name, other in reference.gradients.items()]
    dot = sum(float(mine @ other) for mine, other in pairs)
    mine, other = (sum(float(g @ g) for g in each) ** 0.5 for each in zip(*pairs, strict=True))
    is_zero = mine == other == 0
    changed = max(float(reference.buffers.norm()), unit * reference.buffer_norm, _TINY)
    return {
        LOSS: abs(own.loss - reference.loss) / max(abs(reference.loss), unit),
        NORM: 0.0 if is_zero else abs(mine - other) / max(other, _TINY),
        DIRECTION: 0.0 if is_zero else 1 - dot / (mine * other or _TINY),
        STATISTICS: float((own.buffers - reference.buffers).norm()) / changed,
    }


def tolerances(noise: Mapping[str, float], unit: float) -> dict[str, float]:
    """Return the largest differences that rounding may explain.

    That is four times what random changes of the weights and the data by a rounding do: little to a
    shallow model, much to one whose gradient is ill-conditioned, as with batch norms over few
    samples. It is at least 32 roundings of the loss, and 5% of the rest.
    """
    # Of what turns the gradient by an angle, as much may change its norm.
    turned = max(noise[NORM], (2 * max(0.0, noise[DIRECTION])) ** 0.5)
    return {
        LOSS: max(_LOSS_UNITS * unit, _NOISE_FACTOR * noise[LOSS]),
        NORM: max(_KINK, min(_NOISE_FACTOR * turned, _MAX_NORM_CHANGE)),
        DIRECTION: max(_KINK**2 / 2, _NOISE_FACTOR * noise[DIRECTION]),
        STATISTICS: max(_KINK, _NOISE_FACTOR * noise[STATISTICS]),
    }
