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
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.remote_gradient import RemoteGradient
from kaitian_mpi.integrations.shard.replaced import replace_all
from kaitian_mpi.integrations.shard.script_calls import ScriptCall
from kaitian_mpi.integrations.shard.trainer_shards import TrainerShards


def extend_clipping(shards: TrainerShards) -> Callable[[], None]:
    """Replace torch's functions that read all gradients; return what restores them.

    They give what they give in one process. `clip_grad_norm_` calls the first two. On remote
    gradients, the first is collective, and so is the loss scaling of their optimizers.
    """
    functions = {
        "get_total_norm": _total_norm(clip_grad._get_total_norm, shards),
        "clip_grads_with_norm_": _clip_by_norm(clip_grad._clip_grads_with_norm_, shards),
        "clip_grad_value_": _clip_by_value(clip_grad.clip_grad_value_, shards),
    }
    spelled = [
        (module, name, function)
        for plain, function in functions.items()
        for module in (clip_grad, torch.nn.utils)
        for name in (plain, f"_{plain}")
        if hasattr(module, name)
    ]
    unscale = _unscale(GradScaler._unscale_grads_, shards)
    return replace_all([*spelled, (GradScaler, "_unscale_grads_", unscale)])


def _total_norm(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
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
            return stock(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        if norm_type <= 0:
            raise UserError(
                f"--layout shard does not support norms of order {norm_type}; use a positive order"
            )
        others = [tensor for tensor in tensors if not isinstance(tensor, RemoteGradient)]
        rows = [row for gradient in remote for row in gradient.rows() if row.numel()]
        norm_of_rows, norm_of_others = (
            float(stock(gradients, norm_type, False, foreach)) if gradients else 0.0
            for gradients in (rows, others)
        )
        shards.before_sum(ScriptCall.NORM)
        norm = _joined(
            norm_of_rows, norm_of_others, float(norm_type), shards.world.size, shards.world.rank
        )
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped."
            )
        return torch.tensor(norm, dtype=remote[0].dtype, device=remote[0].device)

    return get_total_norm


def _clip_by_norm(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    @torch.no_grad()
    def clip_grads_with_norm_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        stock(shards.rows_of(parameters), *args, **kwargs)

    return clip_grads_with_norm_


def _clip_by_value(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    @torch.no_grad()
    def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        rows = shards.rows_of(parameters)
        if any(row.grad is not None for row in rows):
            stock(rows, *args, **kwargs)

    return clip_grad_value_


def _unscale(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def unscale_rows(
        scaler: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> Any:
        with shards.optimizers.with_rows(optimizer):
            inf_by_device = dict(stock(scaler, optimizer, inv_scale, found_inf, allow_fp16))
        if shards.optimizers.get(optimizer) is not None:
            shards.before_sum(ScriptCall.UNSCALE)
            inf_by_device.setdefault(found_inf.device, found_inf)
            # Each rank decides by the gradients of all.
            total = torch.tensor(sum(map(float, inf_by_device.values())), dtype=torch.float64)
            sum_on_host(total).wait()
            for number in inf_by_device.values():
                number.fill_(float(total > 0))
        return inf_by_device

    return unscale_rows


def _joined(rows: float, others: float, order: float, size: int, rank: int) -> float:
    """Return the norm of all gradients. Collective.

    Args:
        rows: the norm of this rank's rows.
        others: the norm of the gradients that each rank has whole.
        order: the order of these norms.
        size: how many ranks there are.
        rank: this rank.
    """
    if order == math.inf:
        norms = torch.zeros(size, dtype=torch.float64)
        norms[rank] = rows
        sum_on_host(norms).wait()
        # Not max(), which may lose a NaN.
        return float(torch.cat([norms, torch.tensor([others], dtype=torch.float64)]).max())
    power = torch.tensor(rows**order, dtype=torch.float64)
    sum_on_host(power).wait()
    return float((float(power) + others**order) ** (1 / order))
