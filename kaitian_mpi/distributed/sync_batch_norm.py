"""Batch norm over all ranks' samples: exact for any split, on any mix of devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.errors import UnsupportedError

_local_contexts = 0


@contextmanager
def local_statistics() -> Iterator[None]:
    """Let every `SyncBatchNorm` of this process normalize by its own samples in the block.

    For a forward that not all ranks compute, such as one of a benchmark. Not collective.
    """
    global _local_contexts
    _local_contexts += 1
    try:
        yield
    finally:
        _local_contexts -= 1


def is_local() -> bool:
    """Return whether the caller is inside `local_statistics`."""
    return _local_contexts > 0


class Participation:
    """This rank's weight in the statistics: by default equal on all ranks, as in stock DDP.

    `weight` is called in backward; this rank's gradients are weighted in proportion to it.
    """

    def __init__(self, weight: Callable[[], float] = lambda: 1.0) -> None:
        self.weight = weight

    @property
    def counts(self) -> bool:
        """Whether this rank's samples count, in the forward that begins."""
        return True

    def waits(self) -> AbstractContextManager[None]:
        """Return the context of a collective, which may wait for other ranks."""
        return nullcontext()

    def computed(self, output: torch.Tensor) -> None:
        """Note the output of a forward over all ranks."""


class SyncBatchNorm(_BatchNorm):
    """Batch norm by the mean and variance of all ranks' samples, made by `convert_sync_batchnorm`.

    Each sample counts once, however many a rank has: forward and backward equal those of one
    process with all samples, also for ranks with none. There is one collective of two numbers per
    channel in a forward, and one in its backward; in evaluation mode there is none. So, while it
    trains, every rank must compute the same forwards and backwards in the same order.

    The statistics are float32, or float64 for float64 inputs, whatever the precision of the inputs.
    """

    process_group: dist.ProcessGroup | None = None
    participation: Participation = Participation()

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # The copy is not trained, but has the same process group.
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        if self.process_group is not None:
            copied.process_group = self.process_group
        return copied

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("process_group", "participation")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize `input`, [samples, channels, ...]. Collective while it trains."""
        uses_rank_only = not self.training or is_local() or not dist.is_initialized()
        if uses_rank_only or dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output: torch.Tensor = _Synchronized.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self, self._momentum_of_step()
        )
        self.participation.computed(output)
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: the input has {input.dim()} dimensions instead of 2 or more"
            )

    def _momentum_of_step(self) -> float:
        """Count the forward, and return its momentum for the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0


def convert_sync_batchnorm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Convert every batch norm of a module to one over all ranks' samples.

    The parameters, buffers, hooks and names stay, so that a `state_dict` fits either form. Convert
    before wrapping the module in DDP. In the order of DDP's weights, `data_parallel` and
    `WeightedSum` weight the ranks by their samples, stock DDP equally; the gradients are exact in
    either case. Not collective.

    Args:
        module: changed in place; of `torch.nn.BatchNorm1d`, `2d`, `3d` or `SyncBatchNorm`.
        process_group: the ranks; None for the default group.

    Returns:
        The module.

    Raises:
        UnsupportedError: a batch norm is of a class with a forward of its own, or not initialized.
    """
    for name, norm in module.named_modules():
        if not isinstance(norm, _BatchNorm):
            continue
        if isinstance(norm, _LazyNormBase):
            raise UnsupportedError(
                f"{name or 'the module'}: the {type(norm).__name__} is not initialized; run a "
                "batch through the model first"
            )
        if not isinstance(norm, SyncBatchNorm):
            if type(norm).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise UnsupportedError(
                    f"{name or 'the module'}: a {type(norm).__name__} has a forward of its own; "
                    "use torch.nn.BatchNorm1d, 2d or 3d"
                )
            norm.__class__ = SyncBatchNorm
        norm.__dict__["process_group"] = process_group
    return module


def sync_batch_norms(module: nn.Module) -> list[SyncBatchNorm]:
    """Return the module's batch norms over all ranks."""
    return [norm for norm in module.modules() if isinstance(norm, SyncBatchNorm)]


def participate(module: nn.Module, participation: Participation | None) -> None:
    """Set this rank's participation in the statistics of a module; None: the default."""
    for norm in sync_batch_norms(module):
        norm.__dict__.pop("participation", None)
        if participation is not None:
            norm.participation = participation


@not_compiled
class _Synchronized(torch.autograd.Function):
    """The computation: torch's own kernels, between them the sums over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: SyncBatchNorm,
        momentum: float,
    ) -> torch.Tensor:
        group = norm.process_group
        participation = norm.participation
        counts = participation.counts
        rank_moments = moments(input if counts else input[:0])
        gathered = rank_moments.new_empty(dist.get_world_size(group), rank_moments.numel())
        with participation.waits():
            dist.all_gather(list(gathered.unbind()), rank_moments, group=group)
        count, mean, squares = merge(gathered)
        variance = squares / count.clamp(min=1)
        if norm.running_mean is not None and norm.running_var is not None:
            part = momentum * (count > 0).to(mean.dtype)  # a product with a bool is float32
            unbiased = squares / (count - 1).clamp(min=1)
            for running, new in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                running.copy_(running.to(new.dtype).lerp(new, part))
        scale = torch.ones_like(mean) if weight is None else weight.detach().to(mean.dtype)
        shift = None if bias is None else bias.detach().to(mean.dtype)
        ctx.save_for_backward(input, scale, mean, variance, count)
        ctx.eps = norm.eps
        ctx.group = group
        ctx.participation = participation
        ctx.counts = counts
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        return functional.batch_norm(input, mean, variance, scale, shift, False, 0.0, norm.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = input, scale, mean, variance, _ = ctx.saved_tensors  # checkpointing allows one
        needed = list(ctx.needs_input_grad[:3])
        # With fixed statistics; the sums that these derivatives are, are also those needed below.
        if input.numel():
            # CPUs take the fixed ones, CUDA's and MUSA's kernels those of the forward.
            fixed = mean, variance, mean, torch.rsqrt(variance + ctx.eps)
            of_input, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
                gradient, input, scale, *fixed, False, ctx.eps, [needed[0], True, True]
            )
        else:  # the kernels divide by the number of samples
            of_input, of_scale, of_shift = map(torch.zeros_like, (input, mean, mean))
        if needed[0]:
            _through_statistics(ctx, saved, of_input, torch.stack([of_shift, of_scale]))
        of_parameters = [
            derivative.to(dtype) if need and dtype is not None else None
            for derivative, need, dtype in zip(
                (of_scale, of_shift), needed[1:], ctx.dtypes, strict=True
            )
        ]
        return of_input if needed[0] else None, *of_parameters, None, None


def moments(input: torch.Tensor) -> torch.Tensor:
    """Return each channel's mean and sum of squared deviations, and the count, in one tensor."""
    channels = input.size(1)
    count = input.numel() // max(channels, 1)
    if count == 0:
        return input.new_zeros(2 * channels + 1, dtype=_dtype_of(input))
    dims = [dim for dim in range(input.dim()) if dim != 1]
    variance, mean = torch.var_mean(input.to(_dtype_of(input)), dims, correction=0)
    return torch.cat([mean, variance * count, mean.new_full((1,), count)])


def merge(gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the count, means and sums of squared deviations of all ranks' samples together.

    By deviations from the ranks' means, which loses no digits where the mean is large, as E[x^2] -
    E[x]^2 does: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", 1979 (STAN-CS-79-773), equations 2.1.
    """
    counts = gathered[:, -1:]
    means, squares = gathered[:, :-1].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return count, mean, squares.sum(0) + (counts * (means - mean).square()).sum(0)


def _through_statistics(
    ctx: Any, saved: tuple[torch.Tensor, ...], of_input: torch.Tensor, sums: torch.Tensor
) -> None:
    """Add the part of the input's derivative that goes through the statistics. Collective.

    A rank's gradients are multiplied by its weight only after backward, so others' must be brought
    to this rank's scale: multiplied by their own weight, divided by this one's. `sums` are over
    this rank's samples, of the output's gradient, and of the same times the normalized input.
    """
    weight = float(ctx.participation.weight()) if ctx.counts else 0.0
    # Not multiplied by 0, which would keep a NaN.
    total = sums * weight if weight else torch.zeros_like(sums)
    with ctx.participation.waits():
        dist.all_reduce(total, group=ctx.group)
    if not weight or not of_input.numel():
        return
    input, scale, mean, variance, count = saved
    of_mean, of_variance = total / (weight * count)
    factor = scale * torch.rsqrt(variance + ctx.eps)
    of_input -= functional.batch_norm(
        input, mean, variance, factor * of_variance, factor * of_mean, False, 0.0, ctx.eps
    )


def _dtype_of(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32
