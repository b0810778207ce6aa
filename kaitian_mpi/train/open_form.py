"""The open form, a script's own loop: the epochs and the micro-batches that it goes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.step import Call
from kaitian_mpi.train.task import check_loss


@dataclass(frozen=True)
class Epoch:
    """An epoch, or the rest of one, of `Training.epochs`; its length is the number of its steps.

    Iterating over it again continues, until the next epoch.
    """

    number: int
    """From 0."""
    steps: int
    """Those that are left when it begins."""
    dataset: Any
    train: Callable[[Epoch], Iterator[Any]]
    """Trains it, and yields what its loop is for."""
    split: Callable[[Epoch], Iterator[Any]]

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch, or each step once it is done."""
        return self.train(self)

    def micro_batches(self) -> Iterator[Iterator[Any]]:
        """Yield the micro-batches of each step, as `Training.micro_batches` does."""
        return self.split(self)

    def is_current(self, progress: Progress) -> bool:
        """Return whether the run is in this epoch, and not at its end. Not collective."""
        return progress.epoch == self.number and not progress.epoch_is_over


class OpenStep:
    """A step of the open form, from its batch on.

    Attributes:
        loop: no longer the training's if a rank was lost; the step is then lost, too.
        is_finished: whether the script has ended it.
        has_samples: whether the batch that was yielded last has samples that count.
    """

    def __init__(self, loop: Loop, parts: Sequence[MicroBatch]) -> None:
        """Begin a step with this rank's micro-batches. Collective."""
        self._left = loop.begin(parts)
        self.loop, self._parts, self.is_finished = loop, parts, False
        self._current: int | None = None
        self._has_begun = False  # its backward
        self.has_samples = False

    def micro_batches(self) -> Iterator[Any]:
        """Yield those that are left, on the rank's device; computing begins with the first."""
        self.loop.start_clock()
        while self._left:
            if self._current is not None:
                raise UserError("call training.backward(loss) for each micro-batch")
            self._current = self._left.pop(0)
            self.has_samples = self._parts[self._current].samples > 0
            yield self.loop.place(self._parts[self._current])

    def check(self, loss: Any) -> torch.Tensor:
        """Check that there is a micro-batch whose gradient is missing, and its loss."""
        if self._current is None:
            raise UserError(
                "training.backward() was called twice for one batch; add the losses, and call it "
                "once"
            )
        return check_loss(loss, needs_gradient=self.loop.weight(self._current) > 0)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the current micro-batch; of the last one, sum over the ranks."""
        assert self._current is not None
        index, self._current = self._current, None
        if not self._has_begun:  # else the others would wait for a rank that leaves the step out
            self._has_begun = True
            self.loop.exchange.announce(Call.SUM, self.loop.progress.step)
        self.loop.backward(loss, index, is_last=not self._left)

    def finish(self) -> None:
        """Check that every micro-batch has its gradient; the step is then finished."""
        if self.is_finished:
            raise UserError("training.step() was called twice for one batch; call it once")
        if self._current is not None:
            raise UserError("call training.backward(loss) before training.step()")
        if self._left:
            raise UserError(
                "training.step() was called before the last micro-batch of the step; call it after "
                "the loop over them"
            )
        self.is_finished = True
