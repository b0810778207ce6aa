"""Evaluation, distributed over all ranks; each sample is counted once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from kaitian_mpi.data.loader import evaluation_indices
from kaitian_mpi.engine.computation import Computation
from kaitian_mpi.runtime.watchdog import StepLimit, enter_phase, set_phase_limit

_MAX_BATCH = 64
_MAX_READ_SEC = 0.1


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy over a whole dataset."""

    loss: float
    """Mean cross-entropy."""
    accuracy: float
    """Fraction classified correctly, 0 to 1."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Dataset,
    computation: Computation,
    rank: int,
    shares: Sequence[float],
    micro_batch_size: int | None = None,
    limit: StepLimit | None = None,
) -> Evaluation:
    """Evaluate the model on all samples of `data`; the same result on every rank. Collective.

    Args:
        model: the module, not its DDP wrapper; the same on every rank.
        data: indexed by lists of sample indices.
        computation: this rank's precision and memory format.
        rank: this rank.
        shares: the proportions in which the ranks divide the samples.
        micro_batch_size: samples that fit this rank's memory at once; None: no limit.
        limit: the watchdog's time limit for a batch, which adapts to the batches' times.
    """
    if limit is not None:
        set_phase_limit(limit.limit_sec)
    was_training = model.training
    model.eval()
    # In float64 on the host: exact for any number of samples, on every device.
    totals = torch.zeros(3, dtype=torch.float64)
    length = len(data)  # type: ignore[arg-type]
    batch = min(_MAX_BATCH, micro_batch_size or _MAX_BATCH)
    reader = _Reader(data)
    for indices in evaluation_indices(length, rank, shares, batch):
        samples = reader.read(indices)
        began = time.perf_counter()
        enter_phase("evaluation")
        inputs, labels = computation.place(*samples)
        logits = computation.logits(model, inputs)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        totals += torch.tensor([loss.item(), correct.item(), len(indices)], dtype=torch.float64)
        if limit is not None and limit.observe(time.perf_counter() - began) is not None:
            set_phase_limit(limit.limit_sec)
    model.train(was_training)
    # The slowest rank is waited for, however long that takes.
    enter_phase("the sum of the evaluation", waits=True, limited=False)
    dist.all_reduce(totals)
    loss_sum, correct_sum, count = totals.tolist()
    return Evaluation(loss_sum / count, correct_sum / count)


class _Reader:
    """Reads batches in parts of about 0.1 s each, however slow the dataset is.

    Each part is a phase for the watchdog, so that a slow dataset is not mistaken for a hang.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data
        self._samples = 1  # per part

    def read(self, indices: list[int]) -> list[torch.Tensor]:
        """Return the inputs and the labels of these samples."""
        parts, first = [], 0
        while first < len(indices):
            enter_phase("loading samples to evaluate")
            began = time.perf_counter()
            parts.append(self._data[indices[first : first + self._samples]])
            first += self._samples
            is_fast = time.perf_counter() - began < _MAX_READ_SEC
            self._samples = 2 * self._samples if is_fast else max(1, self._samples // 2)
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
