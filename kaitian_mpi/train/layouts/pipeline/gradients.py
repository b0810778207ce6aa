"""Gradients in layout pipeline: summed over the ranks that share parameters, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.divided_step import DividedGradients
from kaitian_mpi.train.layouts.parameter_groups import ParameterGroups


class StageGradients(DividedGradients):
    """Completes the gradients of a step whose backwards are done.

    Each loss is divided by the samples of the global batch. `factor` corrects that, after `finish`,
    where the samples have other weights.
    """

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
        super().__init__(waits)
        self._targets = targets
        self._owners = owners
        self._rank = rank
        ranks_of = enumerate(tuple(sorted(ranks)) for ranks in owners)
        self._groups = ParameterGroups(ranks_of, rank)
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
        for loss in losses:
            self._facts.add_number(loss)
        self._weight = weight
        self._samples = samples

    def finish(self) -> None:
        """Complete the gradients, and exchange what all ranks must know of them. Collective."""
        for shared in self._groups:
            shared.exchange_gradients(
                self._targets, 1.0, partial(dist.all_reduce, group=shared.group)
            )
        gradients = [
            target.grad
            for number, target in self._targets.items()
            if self._rank == self._owners[number][0] and target.grad is not None
        ]
        self._facts.measure(gradients)
        (weight,) = self._facts.exchange([self._weight])
        self.factor = self._samples / weight if weight else 1.0
        self.reset()

    def reset(self) -> None:
        self._facts.forget_numbers()
        self._weight = 0.0

    def close(self) -> None:
        """End the groups. Not collective."""
        self._groups.close()
