"""Batch norm's running statistics, pooled over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def pool_running_statistics(model: nn.Module, weight: float) -> None:
    """Give every rank the same buffers. Collective.

    Each rank's batch norm has seen its own samples. The pooled mean is the weighted mean of the
    ranks' means, and the pooled variance that of the mixture: E[var + mean^2] - pooled mean^2. So
    the statistics are those of the global batches, without a collective in every step. Other
    buffers are rank 0's, as in stock DDP.

    Args:
        model: the module, not its DDP wrapper.
        weight: this rank's part of the global batch; they sum to 1.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    if norms:
        _pool(norms, weight)
    pooled = {id(b) for m in norms for b in (m.running_mean, m.running_var)}
    for buffer in model.buffers():
        if id(buffer) not in pooled:
            dist.broadcast(buffer, src=0)


def _pool(norms: list[_BatchNorm], weight: float) -> None:
    means = torch.cat([_tensor(norm.running_mean) for norm in norms]).double()
    variances = torch.cat([_tensor(norm.running_var) for norm in norms]).double()
    moments = torch.stack([means, variances + means**2]) * weight
    dist.all_reduce(moments)
    pooled_means, squares = moments
    sizes = [_tensor(norm.running_mean).numel() for norm in norms]
    parts = zip(pooled_means.split(sizes), squares.split(sizes), strict=True)
    for norm, (mean, square) in zip(norms, parts, strict=True):
        _tensor(norm.running_mean).copy_(mean)
        _tensor(norm.running_var).copy_((square - mean**2).clamp_min(0))


def _tensor(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value
