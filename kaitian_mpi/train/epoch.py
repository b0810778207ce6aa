"""An epoch, as a script iterates over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kaitian_mpi.train.progress import Progress


@dataclass(frozen=True)
class Epoch:
    """An epoch, or the rest of one, of `Training.epochs`; its length is the number of its steps.

    Iterating over it again continues, until the next epoch.
    """

    number: int
    """From 0."""
    steps: int
    """Those that are left when it begins."""
    train: Callable[[Epoch], Iterator[Any]]
    """Trains it, and yields what its loop is for."""

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch, or each step once it is done."""
        return self.train(self)

    def is_current(self, progress: Progress) -> bool:
        """Return whether the run is in this epoch, and not at its end. Not collective."""
        return progress.epoch == self.number and not progress.epoch_is_over
