"""Evaluation, spread over all ranks, each sample counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from kaitian_mpi.data import evaluation_indices
from kaitian_mpi.mpi.watchdog import enter_phase
from kaitian_mpi.training.computation import Computation

_LARGEST_BATCH = 64


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
) -> Evaluation:
    """Evaluate the model on all samples of `data`; the same result on every rank. Collective.

    Args:
        model: the module, not its DDP wrapper; the same on every rank.
        data: indexed by lists of sample indices.
        computation: how this rank computes.
        rank: this rank.
        shares: in what proportion the ranks share the work.
        micro_batch_size: samples that fit this rank's memory at once; None: any number.
    """
    was_training = model.training
    model.eval()
    # In float64, on the host: sums of any size, the same whatever device a rank has.
    totals = torch.zeros(3, dtype=torch.float64)
    length = len(data)  # type: ignore[arg-type]
    batch = min(_LARGEST_BATCH, micro_batch_size or _LARGEST_BATCH)
    for indices in evaluation_indices(length, rank, shares, batch):
        enter_phase("evaluation")
        inputs, labels = computation.place(*data[indices])
        logits = computation.logits(model, inputs)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        totals += torch.tensor([loss.item(), right.item(), len(indices)], dtype=torch.float64)
    model.train(was_training)
    # Whose share takes longest is waited for, however long.
    enter_phase("the sum of the evaluation", waits=True, limited=False)
    dist.all_reduce(totals)
    loss_sum, right_sum, count = totals.tolist()
    return Evaluation(loss_sum / count, right_sum / count)
