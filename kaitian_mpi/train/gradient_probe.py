"""One forward and backward of a task on a copy of its model, and how rounding changes them."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.repeatable import Repeatable, without_dropout
from kaitian_mpi.train.task import Task

_MIN_SCALE = 2.0**4
_SCALE_STEP = 2.0**-4
# Sums of hundreds of products round more than a single operation.
_SUM_FACTOR = 16.0
# Of autocast, whose sums are float32; and of convolutions in "fp32" on accelerators, whose TF32 or
# HF32 has 11 bits.
_UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
_TENSOR_CORE_UNIT = 2.0**-11
_FACTORS = 1 << 20
_MATMUL_UNITS = {"high": 2.0**-11, "medium": 2.0**-8}


@dataclass(frozen=True)
class Gradients:
    """The result of a forward and backward, in host memory."""

    loss: float
    by_name: dict[str, torch.Tensor]
    """Of each parameter that has got one."""
    buffers: dict[str, torch.Tensor]
    """What was added to each buffer that was changed, such as a batch norm's statistics."""
    levels: dict[str, float]
    """How large a typical number of each of these buffers is, or of its module's others: the mean
    of a batch may be zero, and is rounded as its variance is."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Both, by name."""
        return {**self.by_name, **self.buffers}


class Noise(NamedTuple):
    """Random relative changes of each parameter, each module's output and its gradient."""

    unit: float
    """The largest."""
    seed: int


def compute_gradients(
    task: Task,
    batch: Any,
    computation: Computation,
    seed: int,
    *,
    dtype: torch.dtype | None = None,
    noise: Noise | None = None,
) -> Gradients:
    """Return the loss and the gradients of the task's model on a batch.

    The model itself, its buffers and torch's random numbers stay as they are. Random numbers drawn
    in between depend on the seed alone, and there is no dropout. Not collective.

    Args:
        task: its model and loss.
        batch: on the host.
        computation: on which device and how.
        seed: of the random numbers.
        dtype: to which the parameters and the batch's floating-point tensors are converted; None:
            they stay as they are.
        noise: random changes, to see what rounding does to the result.
    """
    device = computation.device
    devices = [] if device_of(device).is_host else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        model = copy.deepcopy(task.model).to(device).train()
        without_dropout(model)
        if dtype is not None:
            model = model.to(dtype)
            batch = map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
        placed = computation.place(batch)
        eager = _eager() if dtype is not None or noise is not None else nullcontext()
        with eager, local_statistics(), _noise(model, noise):
            return _compute(task, model, placed, computation, seed)


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled, for what is computed in this way only once."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _compute(
    task: Task, model: nn.Module, batch: Any, computation: Computation, seed: int
) -> Gradients:
    """Compute once; with fp16, again with smaller scales of the loss until nothing overflows."""
    scale = computation.scaler.get_scale() if computation.scaler.is_enabled() else 1.0
    while True:
        before = [buffer.clone() for buffer in model.buffers()] if scale > 1 else []
        torch.manual_seed(seed)
        with Repeatable():
            loss = computation.loss(task, model, batch, needs_gradient=False)
        if loss.requires_grad:  # not of a batch in which nothing counts
            (loss * scale).backward()
        own_dtypes = {name: each.dtype for name, each in task.model.named_parameters()}
        found = {
            name: _on_host(parameter.grad, scale, own_dtypes[name])
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        is_finite = all(bool(gradient.isfinite().all()) for gradient in found.values())
        if is_finite or scale <= _MIN_SCALE:
            return Gradients(loss.item(), found, *_changes_of_buffers(task.model, model))
        scale *= _SCALE_STEP
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)


def _changes_of_buffers(
    before: nn.Module, after: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return what was added to each buffer that was changed, and the levels of these buffers."""
    earlier, changes = dict(before.named_buffers()), {}
    levels: dict[str, float] = {}
    for name, buffer in after.named_buffers():
        own = earlier.get(name)
        if own is None or own.shape != buffer.shape or buffer.layout is not torch.strided:
            continue  # such as a cache that this forward has made
        now = _on_host(buffer, 1.0, torch.float64)
        change = now - _on_host(own, 1.0, torch.float64)
        if change.any():
            changes[name] = change
        if change.any() and buffer.is_floating_point():
            module = name.rpartition(".")[0]
            levels[module] = max(levels.get(module, 0.0), rms([now]))
    return changes, {name: levels.get(name.rpartition(".")[0], 0.0) for name in changes}


def _on_host(gradient: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient as float64 for a parameter that is one, else as float32."""
    dense = gradient.detach() if gradient.layout is torch.strided else gradient.to_dense()
    parts = torch.view_as_real(dense) if dense.is_complex() else dense
    unscaled = parts.to("cpu").double() / scale
    return unscaled if dtype == torch.float64 else unscaled.float()


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


@contextmanager
def _noise(model: nn.Module, noise: Noise | None) -> Iterator[None]:
    """Change a model's parameters, and in the block its modules' outputs and their gradients.

    By random relative amounts up to a unit, as in Monte Carlo arithmetic: Parker, "Monte Carlo
    Arithmetic: exploiting randomness in floating-point arithmetic", 1997.
    """
    if noise is None:
        yield
        return
    factors = _Factors(noise)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(factors.change(parameter))

    def change(_: nn.Module, __: Any, output: Any) -> Any:
        try:
            return map_tensors(output, factors.change_with_gradient)
        except Exception:  # of an output that cannot be rebuilt from changed tensors
            return None  # it stays as it is

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(change) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Factors:
    """Random numbers close to 1: parts of one large drawing, as drawing takes longest."""

    def __init__(self, noise: Noise) -> None:
        generator = torch.Generator().manual_seed(noise.seed)
        drawn = torch.empty(_FACTORS, dtype=torch.float64)
        drawn.uniform_(1 - noise.unit, 1 + noise.unit, generator=generator)
        self._factors = drawn.repeat(2)
        self._places = random.Random(noise.seed)  # noqa: S311  # not for secrets

    @torch.no_grad()
    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, changed at random if it is one of floating-point numbers."""
        if not tensor.is_floating_point():
            return tensor
        size, first = tensor.numel(), self._places.randrange(_FACTORS)
        some = self._factors if size <= _FACTORS else self._factors.repeat(size // _FACTORS + 1)
        factors = some[first : first + size].to(tensor.device)
        # In the tensor's order in memory, so that both are read from start to end.
        changed = torch.empty_like(tensor)
        flat = torch.as_strided(changed, (changed.numel(),), (1,))
        flat.copy_(factors)
        return changed.mul_(tensor)

    def change_with_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Change a tensor, and the gradient that it gets."""
        if not tensor.is_floating_point():
            return tensor
        changed: torch.Tensor = _Change.apply(tensor, self)  # type: ignore[no-untyped-call]
        return changed


class _Change(torch.autograd.Function):
    """Changes a tensor in forward, and its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factors: _Factors) -> torch.Tensor:
        ctx.factors = factors
        return factors.change(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.factors.change(gradient), None


def rms(gradients: Iterable[torch.Tensor]) -> float:
    """Return the root mean square of all elements of some tensors; 0 of none."""
    squares, count = 0.0, 0
    for gradient in gradients:
        squares += float(gradient.double().square().sum())
        count += gradient.numel()
    return float((squares / count) ** 0.5) if count else 0.0
