"""Gradients in layout pipeline: summed over the ranks that share parameters, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.distributed.gradients import (
    Bucket,
    check_dense,
    finite_and_norm,
    group_into_buckets,
    sum_on_host,
    values_of,
)
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.polling import WaitContext

_BUCKET_BYTES = 8 << 20


class StageGradients:
    """Completes the gradients of a step whose backwards are done; in the place of a reducer.

    After `finish`, all ranks know the whole gradient's `squared_norm`, the `factor` to multiply it
    with, and the mean loss, `number`.
    """

    carries_number = True
    is_outdated = False

    def __init__(
        self,
        targets: Mapping[int, nn.Parameter],
        owners: Sequence[Sequence[int]],
        rank: int,
        waits: WaitContext,
    ) -> None:
        """Make a group of each set of ranks that share parameters. Collective.

        `targets` are all parameters of this rank: a script may unfreeze some between two steps, and
        the norm counts also those that no optimizer has.
        """
        self._targets = targets
        self._owners = owners
        self._rank = rank
        self.waits = waits
        self._groups: list[tuple[Any, list[int]]] = []
        shared: dict[tuple[int, ...], list[int]] = {}
        for number, ranks in enumerate(owners):
            if len(ranks) > 1:
                shared.setdefault(tuple(sorted(ranks)), []).append(number)
        for ranks, numbers in shared.items():
            group = dist.new_group([*ranks])
            if rank in ranks:
                self._groups.append((group, numbers))
        self.squared_norm = 0.0
        self.factor = 1.0
        self._is_finite = True
        self.number = torch.zeros((), dtype=torch.float64)
        self._losses: list[torch.Tensor] = []
        self._weight = 0.0
        self._samples = 1

    def arm(self, *_: Any) -> None:
        raise UserError("--layout pipeline requires Task(loss=...)")

    def backward_done(self, losses: list[torch.Tensor], weight: float, samples: int) -> None:
        """Take over a step whose backwards this rank has done. Not collective.

        Args:
            losses: of this rank's micro-batches, each times its weight over `samples`.
            weight: of all its micro-batches; 0 unless it computes losses.
            samples: of the global batch.
        """
        self._losses = losses
        self._weight = weight
        self._samples = samples

    def finish(self) -> None:
        """Complete the gradients, and exchange what all ranks must know of them. Collective."""
        for group, numbers in self._groups:
            parameters = [self._targets[n] for n in numbers if self._targets[n].requires_grad]
            for indices in group_into_buckets(parameters, (_BUCKET_BYTES, _BUCKET_BYTES)):
                bucket = Bucket({index: parameters[index] for index in indices})
                bucket.fill(1.0)
                dist.all_reduce(bucket.gradients, group=group)
                bucket.settle()
        gradients = [
            target.grad
            for number, target in self._targets.items()
            if self._rank == self._owners[number][0] and target.grad is not None
        ]
        check_dense(gradients)
        is_finite, squared_norm = finite_and_norm(gradients)
        loss = sum(values_of(self._losses), 0.0)
        facts = [loss, self._weight, squared_norm, float(not is_finite)]
        total = torch.tensor(facts, dtype=torch.float64)
        sum_on_host(total).wait()
        loss, weight, self.squared_norm, faults = total.tolist()
        self._is_finite = faults == 0
        self.factor = self._samples / weight if weight else 1.0
        self.number = torch.tensor(loss * self.factor, dtype=torch.float64)
        self.squared_norm *= self.factor**2
        self.reset()

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        return self._is_finite

    def share_values(self) -> None:
        """Do nothing: all ranks that have a parameter step it alike."""

    def check_values(self) -> None:
        """Do nothing: no values are under way."""

    def reset(self) -> None:
        self._losses = []
        self._weight = 0.0

    def close(self) -> None:
        """End the groups. Not collective."""
        for group, _ in self._groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups = []
