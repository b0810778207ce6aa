"""Gradients in layout experts: averaged over all ranks, but for those of the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.experts.exchange import TokenExchange
from kaitian_mpi.train.layouts.experts.expert_owners import ExpertOwners

_BUCKET_BYTES = 8 << 20


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
        self.squared_norm = 0.0
        self.number = torch.zeros((), dtype=torch.float64)
        self._owners = owners
        self._exchange = exchange
        self._rank = rank
        self._on_bucket = on_bucket
        self._clips = clips
        self._losses: list[torch.Tensor] = []
        self._is_finite = True
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
        self._mirrored: list[tuple[Any, int, list[int]]] = []
        shared: dict[tuple[int, int], list[int]] = {}
        for number in sorted(owners.owned):
            if len(owners.owners[number]) > 1:
                owner, mirror = owners.owners[number]
                shared.setdefault((owner, mirror), []).append(number)
        for (owner, mirror), numbers in shared.items():
            group = dist.new_group(sorted((owner, mirror)))
            if rank in (owner, mirror):
                self._mirrored.append((group, owner, numbers))

    @property
    def is_outdated(self) -> bool:
        """Whether a parameter requires gradients that did not when this was created."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Count a micro-batch's loss, weighted by its part of the global batch. Not collective."""
        self._losses.append(loss.detach())

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
        held = self._held_gradients()
        check_dense(held)
        is_finite, squared_norm = finite_and_norm(held)
        if self._rank == 0 and self._clips:  # the same on every rank, up to rounding
            own = [p.grad for p in self._dense.values() if p.grad is not None]
            squared_norm += finite_and_norm(own)[1]
        facts = [sum(values_of(self._losses), 0.0), squared_norm, float(not is_finite)]
        total = torch.tensor([*facts, *map(float, used)], dtype=torch.float64)
        with self.waits("the sum of the ranks' norms"):
            sum_on_host(total).wait()
        loss, self.squared_norm, faults, *users = total.tolist()
        self._is_finite = faults == 0 and (self._reducer is None or self._reducer.is_finite())
        self.number = torch.tensor(loss, dtype=torch.float64)
        self._forget_unused(users)
        self._send_to_mirrors()
        self._losses = []

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
        for group, owner, numbers in self._mirrored:
            targets = self._owners.targets
            parameters = [targets[n] for n in numbers if targets[n].requires_grad]
            for indices in group_into_buckets(parameters, (_BUCKET_BYTES, _BUCKET_BYTES)):
                bucket = Bucket({index: parameters[index] for index in indices})
                bucket.fill(1.0 if self._rank == owner else None)
                with self.waits("the gradients of mirrored experts"):
                    dist.broadcast(bucket.gradients, owner, group=group)
                bucket.settle()

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        return self._is_finite

    def share_values(self) -> None:
        """Do nothing: all ranks that have a parameter step it alike."""

    def check_values(self) -> None:
        """Do nothing: no values are under way."""

    def reset(self) -> None:
        if self._reducer is not None:
            self._reducer.reset()
        self._losses = []
        self._exchange.reset()

    def close(self) -> None:
        """End the groups. Not collective."""
        if self._reducer is not None:
            self._reducer.close()
        for group, _, _ in self._mirrored:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._mirrored = []
