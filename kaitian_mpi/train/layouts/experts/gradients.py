"""Gradients in layout experts: averaged over all ranks, but for those of the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.step_facts import StepFacts
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.experts.exchange import TokenExchange
from kaitian_mpi.train.layouts.experts.expert_owners import ExpertOwners
from kaitian_mpi.train.layouts.parameter_groups import ParameterGroups


class ExpertGradients:
    """Sums the gradients of a step whose losses are weighted; in the place of a reducer.

    Those outside of experts are summed over all ranks during backward. An expert's is complete on
    its owner, which sends it to the mirror. After `finish`, all ranks know the mean loss, `number`,
    and if it is to be clipped, the whole gradient's `squared_norm`.
    """

    carries_number = True
    factor = 1.0
    """What gradients are to be multiplied with: the losses were weighted."""

    def __init__(
        self,
        owners: ExpertOwners,
        model: nn.Module,
        exchange: TokenExchange,
        rank: int,
        waits: WaitContext,
        on_bucket: Callable[[bool], None],
        clips: bool,
    ) -> None:
        """Watch a model's parameters; make a group of each owner and mirror. Collective."""
        self.waits = waits
        self._facts = StepFacts()
        self._owners = owners
        self._exchange = exchange
        self._rank = rank
        self._on_bucket = on_bucket
        self._clips = clips
        self._dense = {
            name: parameter
            for number, (name, parameter) in enumerate(model.named_parameters())
            if number not in owners.owned
        }
        self._frozen = [p for p in self._dense.values() if not p.requires_grad]
        is_trained = len(self._frozen) < len(self._dense)
        self._reducer = (
            GradientReducer(model, parameters=self._dense, on_bucket=on_bucket)
            if is_trained
            else None
        )
        mirrored = ((number, tuple(owners.owners[number])) for number in sorted(owners.owned))
        self._mirrored = ParameterGroups(mirrored, rank)

    @property
    def number(self) -> torch.Tensor:
        """The mean loss over the global batch; float64, without dimensions."""
        return self._facts.number

    @property
    def squared_norm(self) -> float:
        """Of the whole gradient, if it is to be clipped; the same on every rank."""
        return self._facts.squared_norm

    @property
    def is_outdated(self) -> bool:
        """Whether a parameter requires gradients that did not when this was created."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Count a micro-batch's loss, weighted by its part of the global batch. Not collective."""
        self._facts.add_number(loss.detach())

    def zero_dense(self) -> None:
        """Set to zero what is not of an expert: it is of samples that do not count."""
        for parameter in self._dense.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def arm(self, weight: Any, number: torch.Tensor | None = None) -> None:
        """Have the next backward sum over the ranks; see `GradientReducer.arm`."""
        if self._reducer is not None:
            self._reducer.arm(weight)

    def finish(self) -> None:
        """Complete the gradients, and exchange what all ranks must know of them. Collective."""
        if self._reducer is not None:
            self._reducer.finish()
        else:
            self._on_bucket(True)
        used = self._exchange.take_used()
        measured = self._held_gradients()
        if self._rank == 0 and self._clips:  # the same on every rank, up to rounding
            measured += [p.grad for p in self._dense.values() if p.grad is not None]
        self._facts.measure(measured)
        with self.waits("the sum of the ranks' norms"):
            users = self._facts.exchange([*map(float, used)])
        self._forget_unused(users)
        self._send_to_mirrors()

    def _held_gradients(self) -> list[torch.Tensor]:
        targets = self._owners.targets
        return [
            gradient
            for number in sorted(self._owners.owned)
            if self._rank == self._owners.owners[number][0]
            and (gradient := targets[number].grad) is not None
        ]

    def _forget_unused(self, users: Sequence[float]) -> None:
        """Let experts have no gradient, as alone, if no rank's loss depends on their mixture."""
        for count, numbers in zip(users, self._owners.numbers_by_mixture(), strict=True):
            for number in numbers if not count else ():
                if number in self._owners.targets:
                    self._owners.targets[number].grad = None

    def _send_to_mirrors(self) -> None:
        for mirrored in self._mirrored:
            owner, _ = mirrored.ranks
            weight = 1.0 if self._rank == owner else None
            send = partial(dist.broadcast, src=owner, group=mirrored.group)
            with self.waits("the gradients of mirrored experts"):
                mirrored.exchange_gradients(self._owners.targets, weight, send)

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        is_dense_finite = self._reducer is None or self._reducer.is_finite()
        return is_dense_finite and self._facts.is_finite

    def share_values(self) -> None:
        """Do nothing: all ranks that have a parameter step it alike."""

    def check_values(self) -> None:
        """Do nothing: no values are under way."""

    def reset(self) -> None:
        if self._reducer is not None:
            self._reducer.reset()
        self._facts.forget_numbers()
        self._exchange.reset()

    def close(self) -> None:
        """End the groups. Not collective."""
        if self._reducer is not None:
            self._reducer.close()
        self._mirrored.close()
