"""Evaluation, spread over all ranks, each sample counted once."""

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

_LARGEST_BATCH = 64
_PIECE_SEC = 0.1


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy over a whole data set."""

    loss: float
    """Mean cross-entropy."""
    accuracy: float
    """Fraction classified right, 0 to 1."""


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
        computation: how this rank computes.
        rank: this rank.
        shares: in what proportion the ranks share the work.
        micro_batch_size: samples that fit this rank's memory at once; None: any number.
        limit: the watchdog's for a batch, which follows what batches take.
    """
    if limit is not None:
        set_phase_limit(limit.limit_sec)
    was_training = model.training
    model.eval()
    # In float64, on the host: sums of any size, the same whatever device a rank has.
    totals = torch.zeros(3, dtype=torch.float64)
    length = len(data)  # type: ignore[arg-type]
    batch = min(_LARGEST_BATCH, micro_batch_size or _LARGEST_BATCH)
    loading = _Loading(data)
    for indices in evaluation_indices(length, rank, shares, batch):
        samples = loading.load(indices)
        began = time.perf_counter()
        enter_phase("evaluation")
        inputs, labels = computation.place(*samples)
        logits = computation.logits(model, inputs)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        totals += torch.tensor([loss.item(), right.item(), len(indices)], dtype=torch.float64)
        if limit is not None and limit.observe(time.perf_counter() - began) is not None:
            set_phase_limit(limit.limit_sec)
    model.train(was_training)
    # Whose share takes longest is waited for, however long.
    enter_phase("the sum of the evaluation", waits=True, limited=False)
    dist.all_reduce(totals)
    loss_sum, right_sum, count = totals.tolist()
    return Evaluation(loss_sum / count, right_sum / count)


class _Loading:
    """Loads batches in pieces that take a moment each, however slow a data set is.

    Each is a phase to the watchdog, so that only a sample that hangs is taken for a hang.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data
        self._samples = 1  # of a piece

    def load(self, indices: list[int]) -> list[torch.Tensor]:
        """Return the inputs and the labels of these samples."""
        pieces, first = [], 0
        while first < len(indices):
            enter_phase("loading samples to evaluate")
            began = time.perf_counter()
            pieces.append(self._data[indices[first : first + self._samples]])
            first += self._samples
            is_fast = time.perf_counter() - began < _PIECE_SEC
            self._samples = 2 * self._samples if is_fast else max(1, self._samples // 2)
        return [torch.cat(tensors) for tensors in zip(*pieces, strict=True)]
