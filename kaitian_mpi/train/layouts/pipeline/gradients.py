"""Gradients in layout pipeline: summed over the ranks that share parameters, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.distributed.step_facts import StepFacts
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.parameter_groups import ParameterGroups


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
        ranks_of = enumerate(tuple(sorted(ranks)) for ranks in owners)
        self._groups = ParameterGroups(ranks_of, rank)
        self.factor = 1.0
        self._facts = StepFacts()
        self._weight = 0.0
        self._samples = 1

    @property
    def number(self) -> torch.Tensor:
        """The mean loss over the global batch; float64, without dimensions."""
        return self._facts.number * self.factor

    @property
    def squared_norm(self) -> float:
        """Of the whole gradient, times `factor`; the same on every rank."""
        return self._facts.squared_norm * self.factor**2

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

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        return self._facts.is_finite

    def share_values(self) -> None:
        """Do nothing: all ranks that have a parameter step it alike."""

    def check_values(self) -> None:
        """Do nothing: no values are under way."""

    def reset(self) -> None:
        self._facts.forget_numbers()
        self._weight = 0.0

    def close(self) -> None:
        """End the groups. Not collective."""
        self._groups.close()
