"""Batch norm's running statistics: tracked per rank while training, then pooled over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kaitian_mpi.distributed.sync_batch_norm import SyncBatchNorm, is_local

_MIN_WEIGHT = 1e-30  # so that the mean is defined even if no rank has seen a sample
_TIME_CONSTANTS = 5.0  # until a momentum has forgotten the statistics of earlier weights


class RunningStatistics:
    """Keeps a model's running statistics usable for evaluation with any batch sizes per rank.

    The mean over the ranks equals that of one device with the global batches: a step is weighted by
    the momentum, however many micro-batches it is computed in, and a rank by its fraction of each
    step's samples, however the plan changes.

    Attributes:
        norms: the layers.
        fractions: per layer, this rank's fraction of the samples that the ranks' statistics are
            based on. Steps are weighted as in the statistics themselves. None if unknown, e.g. for
            statistics loaded from elsewhere: then the fraction in the next step is used.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the batch norm layers of a model: the module, not its DDP wrapper."""
        self._model = model
        self.norms: list[Any] = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        self._momenta = [norm.momentum for norm in self.norms]
        self.fractions: list[float] | None = None
        self._fractions_before: list[float] = []
        self._step_momenta: list[float] = []
        self._taken = 0
        self._samples = 0

    def set_fractions(self, fractions: list[float] | None) -> None:
        """Set each norm's fraction of the statistics that is this rank's; None if unknown."""
        self.fractions = fractions

    def lag(self, step_in_epoch: int) -> bool:
        """Return whether the statistics may lag behind the weights after so many steps of an epoch.

        They do in a short epoch: its first steps count as much as its last, and while the weights
        move fast even the step before is far off.
        """
        if any(isinstance(norm, nn.SyncBatchNorm) for norm in self.norms):
            return False  # ranks that compute it must do so together
        momentum = min((momentum for momentum in self._momenta if momentum), default=0.0)
        return momentum > 0 and 0 < step_in_epoch < _TIME_CONSTANTS / momentum

    def before_step(self, step_in_epoch: int, rank_samples: int, samples: int) -> None:
        """Restart the statistics of an epoch, as the mean of its steps so far.

        A momentum of 0.1 needs tens of steps to forget the initial weights, and an epoch may have
        only six. Once the model's own momentum weights a step more than such a mean would, that
        momentum applies as usual.
        """
        fraction = rank_samples / samples
        self._fractions_before = self.fractions or [fraction] * len(self.norms)
        self._step_momenta = [
            max(momentum or 0.0, 1.0 / (step_in_epoch + 1)) for momentum in self._momenta
        ]
        self._taken = 0
        self._samples = samples
        self.fractions = self._current_fractions()
        for norm, step_momentum in zip(self.norms, self._step_momenta, strict=True):
            if norm.momentum is not None and _is_synchronized(norm):
                norm.momentum = step_momentum

    def before_batch(self, samples: int) -> None:
        """Weight the next forward pass by its number of samples in the step."""
        self._taken += samples
        self.fractions = self._current_fractions()
        weights = zip(self.norms, self._momenta, self._step_momenta, self.fractions, strict=True)
        for norm, momentum, step_momentum, fraction in weights:
            if momentum is not None and not _is_synchronized(norm):
                norm.momentum = step_momentum * (samples / self._samples / fraction)

    def restore_momenta(self) -> None:
        """Give the layers the model's own momentum again, after a step."""
        for norm, momentum in zip(self.norms, self._momenta, strict=True):
            norm.momentum = momentum

    def _current_fractions(self) -> list[float]:
        fraction = self._taken / self._samples
        by_layer = zip(self.norms, self._fractions_before, self._step_momenta, strict=True)
        return [
            # If synchronized, every rank's statistics are those of all ranks.
            1.0 if _is_synchronized(norm) else fraction + (1.0 - momentum) * (before - fraction)
            for norm, before, momentum in by_layer
        ]

    def synchronized_buffers(self) -> set[int]:
        """Return the ids of the buffers that a step gives the same content on every rank."""
        norms = [norm for norm in self.norms if _is_synchronized(norm)]
        return {id(buffer) for norm in norms for buffer in norm.buffers()}

    @torch.no_grad()
    def pool(self, fraction: float) -> None:
        """Give every rank the same buffers. Collective.

        Each rank's batch norm has seen only its own samples. The pooled mean is the weighted mean
        of the ranks' means, the pooled variance that of the mixture: E[var + mean^2] - pooled
        mean^2. So no step needs a collective. All other buffers are copied from rank 0, as in
        stock DDP.
        """
        if self.norms:
            fractions = self.fractions or [fraction] * len(self.norms)
            sizes = torch.tensor([norm.running_mean.numel() for norm in self.norms])
            clamped = torch.tensor(fractions, dtype=torch.float64).clamp_min(_MIN_WEIGHT)
            weights = clamped.repeat_interleave(sizes)
            sums = torch.cat([self.moments() * weights, weights[None]])
            dist.all_reduce(sums)
            self.load_moments(sums[:2] / sums[2])
        pooled = {id(b) for m in self.norms for b in (m.running_mean, m.running_var)}
        for buffer in self._model.buffers():
            if id(buffer) not in pooled:
                dist.broadcast(buffer, src=0)

    def moments(self) -> torch.Tensor:
        """Return the means and mean squares of all layers, float64 [2, channels]."""
        if not self.norms:
            return torch.zeros(2, 0, dtype=torch.float64)
        means = torch.cat([norm.running_mean for norm in self.norms]).cpu().double()
        variances = torch.cat([norm.running_var for norm in self.norms]).cpu().double()
        return torch.stack([means, variances + means**2])

    def load_moments(self, moments: torch.Tensor) -> None:
        """Set the running statistics from a result of `moments`, or a weighted mean of several."""
        means, squares = moments
        sizes = [norm.running_mean.numel() for norm in self.norms]
        parts = zip(means.split(sizes), squares.split(sizes), strict=True)
        for norm, (mean, square) in zip(self.norms, parts, strict=True):
            norm.running_mean.copy_(mean)
            norm.running_var.copy_((square - mean**2).clamp_min(0))


def _is_synchronized(norm: _BatchNorm) -> bool:
    """Return whether a layer's forward takes the statistics of all ranks."""
    return isinstance(norm, SyncBatchNorm) and not is_local()
