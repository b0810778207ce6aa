"""Norms and clipping of gradients that are with their owners, and their loss scaling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils
from torch.amp import GradScaler
from torch.nn.utils import clip_grad

from kaitian_mpi.distributed.gradients import sum_on_host
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.integrations.shard.remote_gradient import RemoteGradient
from kaitian_mpi.integrations.shard.replaced import replace_all
from kaitian_mpi.integrations.shard.trainer_shards import TrainerShards


def extend_clipping(shards: TrainerShards) -> Callable[[], None]:
    """Replace torch's functions that read all gradients; return what restores them.

    They give what they give in one process. `clip_grad_norm_` calls the first two. On remote
    gradients, the first is collective, and so is the loss scaling of their optimizers.
    """
    total, clip, clip_value = (
        getattr(clip_grad, name)
        for name in ("_get_total_norm", "_clip_grads_with_norm_", "clip_grad_value_")
    )
    unscale: Any = GradScaler._unscale_grads_

    @functools.wraps(total)
    @torch.no_grad()
    def get_total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        remote = [tensor for tensor in tensors if isinstance(tensor, RemoteGradient)]
        if not remote:
            return total(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        if norm_type <= 0:
            raise UnsupportedError(
                f"--layout shard does not support norms of order {norm_type}; use a positive order"
            )
        others = [tensor for tensor in tensors if not isinstance(tensor, RemoteGradient)]
        rows = [row for gradient in remote for row in gradient.rows() if row.numel()]
        own, local = (
            float(total(gradients, norm_type, False, foreach)) if gradients else 0.0
            for gradients in (rows, others)
        )
        norm = _joined(own, local, float(norm_type), shards.world.size, shards.world.rank)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped."
            )
        return torch.tensor(norm, dtype=remote[0].dtype, device=remote[0].device)

    @functools.wraps(clip)
    @torch.no_grad()
    def clip_grads_with_norm_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        clip(shards.rows_of(parameters), *args, **kwargs)

    @functools.wraps(clip_value)
    @torch.no_grad()
    def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        own = shards.rows_of(parameters)
        if any(parameter.grad is not None for parameter in own):
            clip_value(own, *args, **kwargs)

    @functools.wraps(unscale)
    def unscale_own(
        scaler: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> Any:
        with shards.inside(optimizer):
            inf_by_device = dict(unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16))
        if shards.optimizer_of(optimizer) is not None:
            inf_by_device.setdefault(found_inf.device, found_inf)
            # Each rank decides by the gradients of all.
            total = torch.tensor(sum(map(float, inf_by_device.values())), dtype=torch.float64)
            sum_on_host(total).wait()
            for number in inf_by_device.values():
                number.fill_(float(total > 0))
        return inf_by_device

    replaced = {
        "get_total_norm": get_total_norm,
        "clip_grads_with_norm_": clip_grads_with_norm_,
        "clip_grad_value_": clip_grad_value_,
    }
    spelled = [
        (module, name, function)
        for plain, function in replaced.items()
        for module in (clip_grad, torch.nn.utils)
        for name in (plain, f"_{plain}")
        if hasattr(module, name)
    ]
    return replace_all([*spelled, (GradScaler, "_unscale_grads_", unscale_own)])


def _joined(own: float, local: float, order: float, size: int, rank: int) -> float:
    """Return the norm of all ranks' rows, and of what each rank has whole. Collective."""
    if order == math.inf:
        norms = torch.zeros(size, dtype=torch.float64)
        norms[rank] = own
        sum_on_host(norms).wait()
        # Not max(), which may lose a NaN.
        return float(torch.cat([norms, torch.tensor([local], dtype=torch.float64)]).max())
    power = torch.tensor(own**order, dtype=torch.float64)
    sum_on_host(power).wait()
    return float((float(power) + local**order) ** (1 / order))
