"""Batch norm's running statistics: followed while training, pooled over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class RunningStatistics:
    """Keeps a model's running statistics fit for evaluation, whatever the ranks' shares."""

    def __init__(self, model: nn.Module) -> None:
        """Find the batch norms of a model: the module, not its DDP wrapper."""
        self._model = model
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        self._momenta = [norm.momentum for norm in self._norms]

    def before_step(self, step_in_epoch: int) -> None:
        """Let the statistics of an epoch begin anew, as the mean of its steps so far.

        A momentum of 0.1 needs tens of steps to forget the weights of the start, and an epoch may
        have six. Once an epoch has more steps than the model's own momentum looks back, that
        momentum is at work, as usual.

        Args:
            step_in_epoch: 0 for the epoch's first step.
        """
        for norm, momentum in zip(self._norms, self._momenta, strict=True):
            if momentum is not None:
                norm.momentum = max(momentum, 1.0 / (step_in_epoch + 1))

    def pool(self, weight: float) -> None:
        """Give every rank the same buffers. Collective.

        Each rank's batch norm has seen its own samples. The pooled mean is the weighted mean of the
        ranks' means, and the pooled variance that of the mixture: E[var + mean^2] - pooled mean^2.
        So the statistics are those of the global batches, without a collective in every step. Other
        buffers are rank 0's, as in stock DDP.

        Args:
            weight: this rank's part of the global batch; they sum to 1.
        """
        if self._norms:
            moments = self.moments() * weight
            dist.all_reduce(moments)
            self.load_moments(moments)
        pooled = {id(b) for m in self._norms for b in (m.running_mean, m.running_var)}
        for buffer in self._model.buffers():
            if id(buffer) not in pooled:
                dist.broadcast(buffer, src=0)

    def moments(self) -> torch.Tensor:
        """Return the means and the mean squares of all norms, float64 [2, channels]."""
        if not self._norms:
            return torch.zeros(2, 0, dtype=torch.float64)
        means = torch.cat([_tensor(norm.running_mean) for norm in self._norms]).double()
        variances = torch.cat([_tensor(norm.running_var) for norm in self._norms]).double()
        return torch.stack([means, variances + means**2])

    def load_moments(self, moments: torch.Tensor) -> None:
        """Set the running statistics from what `moments` returned, or a weighted mean of such."""
        means, squares = moments
        sizes = [_tensor(norm.running_mean).numel() for norm in self._norms]
        parts = zip(means.split(sizes), squares.split(sizes), strict=True)
        for norm, (mean, square) in zip(self._norms, parts, strict=True):
            _tensor(norm.running_mean).copy_(mean)
            _tensor(norm.running_var).copy_((square - mean**2).clamp_min(0))


def _tensor(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value
