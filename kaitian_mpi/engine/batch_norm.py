"""Batch norm's running statistics: followed while training, pooled over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_NEARLY_NONE = 1e-30  # so that there is a mean even where no rank has seen a sample


class RunningStatistics:
    """Keeps a model's running statistics usable for evaluation with any batch sizes per rank.

    The mean over the ranks is that of one device with the global batches: a step counts by the
    momentum, however many micro-batches it is computed in, and a rank counts by its part of each
    step's samples, however the plan changes.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the batch norms of a model: the module, not its DDP wrapper."""
        self._model = model
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        self._momenta = [norm.momentum for norm in self._norms]
        self._parts: list[float] | None = None
        self._kept_parts: list[float] | None = None
        self._before: list[float] = []
        self._of_step: list[float] = []
        self._taken, self._samples = 0, 0

    @property
    def parts(self) -> list[float] | None:
        """By norm, this rank's part of the samples that its statistics are of, all ranks' being 1.

        Steps count as in the statistics themselves. None where it is not known, as in statistics
        that come from elsewhere: then the part in the next step is taken for it.
        """
        return self._parts

    @parts.setter
    def parts(self, parts: list[float] | None) -> None:
        self._parts = None if parts is None else list(parts)

    def keep(self) -> None:
        """Remember what a step changes besides the model's buffers."""
        self._kept_parts = self._parts

    def undo(self) -> None:
        """Take back what has changed since."""
        self._parts = self._kept_parts

    def before_step(self, step_in_epoch: int, own_samples: int, samples: int) -> None:
        """Restart the statistics of an epoch, as the mean of its steps so far.

        A momentum of 0.1 needs tens of steps to forget the weights of the start, and an epoch may
        have six. Once an epoch has more steps than the model's own momentum looks back, that
        momentum is at work, as usual.

        Args:
            step_in_epoch: 0 for the epoch's first step.
            own_samples: this rank's in the step.
            samples: of the step, over all ranks.
        """
        own = own_samples / samples
        self._before = self._parts or [own] * len(self._norms)
        self._of_step = [
            max(momentum or 0.0, 1.0 / (step_in_epoch + 1)) for momentum in self._momenta
        ]
        self._taken, self._samples = 0, samples
        self._parts = self._parts_now()

    def before_batch(self, samples: int) -> None:
        """Let the next forward, of so many samples of the step, count by them."""
        self._taken += samples
        self._parts = self._parts_now()
        weights = zip(self._norms, self._momenta, self._of_step, self._parts, strict=True)
        for norm, momentum, of_step, part in weights:
            if momentum is not None:
                norm.momentum = of_step * (samples / self._samples / part)

    def _parts_now(self) -> list[float]:
        taken = self._taken / self._samples
        return [
            taken if of_step == 1.0 else before + of_step * (taken - before)
            for before, of_step in zip(self._before, self._of_step, strict=True)
        ]

    @torch.no_grad()
    def pool(self, part: float) -> None:
        """Give every rank the same buffers. Collective.

        Each rank's batch norm has seen its own samples. The pooled mean is the weighted mean of the
        ranks' means, and the pooled variance that of the mixture: E[var + mean^2] - pooled mean^2.
        So the statistics are those of the global batches, without a collective in every step. Other
        buffers are rank 0's, as in stock DDP.

        Args:
            part: this rank's part of the samples, where it is not known from the steps.
        """
        if self._norms:
            parts = self._parts or [part] * len(self._norms)
            weights = torch.cat(
                [
                    torch.full_like(_tensor(norm.running_mean), max(part, _NEARLY_NONE))
                    for norm, part in zip(self._norms, parts, strict=True)
                ]
            ).double()
            sums = torch.cat([self.moments() * weights, weights[None]])
            dist.all_reduce(sums)
            self.load_moments(sums[:2] / sums[2])
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
