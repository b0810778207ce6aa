"""Gradients in layout experts: averaged over all ranks, but for those of the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.divided_step import DividedGradients
from kaitian_mpi.train.layouts.experts.exchange import TokenExchange
from kaitian_mpi.train.layouts.experts.expert_owners import ExpertOwners
from kaitian_mpi.train.layouts.parameter_groups import ParameterGroups


class ExpertGradients(DividedGradients):
    """Sums the gradients of a step whose losses are weighted, so that `factor` stays 1.

    Those outside of experts are summed over all ranks during backward. An expert's is complete on
    its owner, which sends it to the mirror. The `squared_norm` is that of the whole gradient only
    if it is to be clipped.
    """

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
        super().__init__(waits)
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
    def is_outdated(self) -> bool:
        """Whether a parameter requires gradients that did not when this was created."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Count a micro-batch's loss, weighted by its part of the global batch. Not collective."""
        self._facts.add_number(loss.detach())

    def zero_dense(self) -> None:
        """Set the gradients outside of experts to zero: they are of samples that do not count."""
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
        gradients = self._gradients_of_owned_experts()
        if self._rank == 0 and self._clips:  # the same on every rank, up to rounding
            gradients += [p.grad for p in self._dense.values() if p.grad is not None]
        self._facts.measure(gradients)
        with self.waits("the sum of the ranks' norms"):
            users = self._facts.exchange([*map(float, used)])
        self._forget_unused(users)
        self._send_to_mirrors()

    def _gradients_of_owned_experts(self) -> list[torch.Tensor]:
        """Return the gradients of the experts that this rank owns, but not of those it mirrors."""
        owned = [n for n in sorted(self._owners.owned) if self._owners.owners[n][0] == self._rank]
        gradients = [self._owners.targets[number].grad for number in owned]
        return [gradient for gradient in gradients if gradient is not None]

    def _forget_unused(self, users: Sequence[float]) -> None:
        """Free the gradients of the mixtures that no rank's loss depends on.

        A job of one rank would have none for them either. `users` is the number of ranks whose loss
        depends on each mixture.
        """
        for count, numbers in zip(users, self._owners.numbers_by_mixture(), strict=True):
            if count:
                continue
            for number in numbers:
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
        is_dense_finite = self._reducer is None or self._reducer.is_finite()
        return is_dense_finite and super().is_finite()

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
