"""The optimizers of a script, and this rank's side of those that step a model with owners."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from kaitian_mpi.integrations.shard.local_optimizer_state import FindModel
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.owned_optimizer import (
    OwnedOptimizer,
    Step,
    check_steps_by_parameter,
    parameters_of,
)
from kaitian_mpi.integrations.shard.remote_reads import ReadKind
from kaitian_mpi.integrations.shard.served_registry import ServedRegistry


class OptimizerRegistry:
    """Finds this rank's side of each optimizer that the script has created."""

    def __init__(self, find_model: FindModel, served: ServedRegistry) -> None:
        """Have none yet.

        Args:
            find_model: returns the model of a parameter; None if it is in no DDP.
            served: gets the states that other ranks may read.
        """
        self._find_model = find_model
        self._served = served
        self._created: list[weakref.ref[Optimizer]] = []
        self._owned = weakref.WeakKeyDictionary[Optimizer, OwnedOptimizer]()

    def add(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer that the script has created."""
        self._created.append(weakref.ref(optimizer))

    def of_model(self, model: OwnedModel) -> list[Optimizer]:
        """Return the optimizers that step a model, in the order of their creation."""
        created = [optimizer for ref in self._created if (optimizer := ref()) is not None]
        return [optimizer for optimizer in created if model in self._models_of(optimizer)]

    def get(self, optimizer: Optimizer) -> OwnedOptimizer | None:
        """Return this rank's side of an optimizer; None if it has none yet."""
        return self._owned.get(optimizer)

    def own(self, optimizer: Optimizer) -> OwnedOptimizer | None:
        """Return this rank's side of an optimizer, from now on if it steps a model in a DDP.

        To be called at the same place of the script on every rank.
        """
        owned = self._owned.get(optimizer)
        if owned is not None and owned.has_rows:
            return owned
        models = self._models_of(optimizer)
        if owned is None:
            if not models:
                return None
            check_steps_by_parameter(optimizer)
            owned = OwnedOptimizer(self._served.next_index(ReadKind.OPTIMIZER), self._find_model)
            self._owned[optimizer] = owned
            self._served.add(ReadKind.OPTIMIZER, owned.state, of=optimizer)
        owned.follow(optimizer, models)
        if not owned.has_begun and all(model.has_owners for model in owned.models):
            for model in owned.models:
                model.check_optimizer(optimizer)
            owned.begin(optimizer)
        return owned

    def in_steps(self) -> list[Step]:
        """Return the optimizers that are in a step, which has failed or calls another one's."""
        return [(optimizer, owned) for optimizer, owned in self._owned.items() if owned.has_rows]

    @contextmanager
    def with_rows(self, optimizer: Optimizer) -> Iterator[None]:
        """Let an optimizer have this rank's rows in the block, at the same place on every rank."""
        owned = self.own(optimizer)
        if owned is None or owned.has_rows:
            yield
            return
        owned.swap_in_rows(optimizer)
        try:
            yield
        finally:
            owned.swap_out_rows(optimizer)

    def end_backward(self) -> None:
        """Take note that no rank reads the states of earlier steps any more."""
        for owned in self._owned.values():
            owned.state.end_backward()

    def _models_of(self, optimizer: Optimizer) -> list[OwnedModel]:
        """Return the models in a DDP that an optimizer steps, in the order of its parameters."""
        models = [self._find_model(parameter) for parameter in parameters_of(optimizer)]
        return [*dict.fromkeys([model for model in models if model is not None])]
