"""A rank's part of the training state: all of it, unless a layout divides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.state_transfer import plain

if TYPE_CHECKING:
    from mpi4py import MPI


class Collected(NamedTuple):
    """All of a model's and its optimizers' state, on rank 0; on others what they have."""

    model: dict[str, Any]
    """As the model's `state_dict`."""
    optimizers: list[dict[str, Any]]
    """As the optimizers' `state_dict`."""
    fault: OSError | None
    """Why rank 0 does not have it, e.g. as the disk is full; None if it does."""


class Partition:
    """The part of a model's parameters, and of its optimizers' state, that this rank has.

    This is all of them; a layout that divides them has a class derived from this one.
    """

    is_whole: ClassVar[bool] = True
    """Whether it is all, on every rank."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self.owned: frozenset[int] = frozenset()
        """The numbers of the parameters of which only some ranks have the values."""

    @property
    def has_copies(self) -> bool:
        """Whether all of the state is on two ranks, if there are two."""
        return True

    def is_complete(self, comm: MPI.Intracomm) -> bool:
        """Return whether these ranks have all of the state. Collective."""
        return True

    def drop(self) -> None:
        """Forget all of the state that is a part only, as the rest is lost. Not collective."""

    def drop_start(self) -> None:
        """Forget such a part if it is that of the run's start. Not collective."""

    def zero_gradients(self) -> None:
        """Free gradients that are not the model's own parameters'. Not collective."""

    def model_state(self) -> dict[str, Any]:
        """Return the model's `state_dict`, with empty tensors for what other ranks own.

        Not collective; but it waits for values that other ranks have sent.
        """
        with torch._C.DisableTorchFunctionSubclass():  # of parameters without their values
            return plain(self._model.state_dict())

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return the optimizers' `state_dict`; without any state if that is divided."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load(self, model: dict[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> None:
        """Load results of `model_state` and `optimizer_states`, of this rank or another.

        Not collective.

        Raises:
            RuntimeError: they are of another model.
            ValueError: they are of other parameters.
        """
        self._model.load_state_dict(model)
        for optimizer, content in zip(self._optimizers, optimizers, strict=True):
            optimizer.load_state_dict(dict(content))

    def take(
        self, model: dict[str, Any], optimizers: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Keep what is divided of a whole state, and return the rest, to be loaded by every rank.

        Not collective.
        """
        return model, optimizers

    def collect(
        self,
        world: World,
        folder: Path | None,
        only_values: bool = False,
        on_piece: Callable[[], None] = lambda: None,
    ) -> Collected:
        """Return all of the state on rank 0, or if `only_values` that of the model. Collective.

        What rank 0 does not have itself is in files without a name in `folder`, and takes no
        memory. Whenever a piece of that is there, `on_piece` is called.
        """
        return Collected(self.model_state(), self.optimizer_states(), None)
