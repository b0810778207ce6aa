"""A step of the open form, whose forward and loss the script computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.attempt import Attempt
from kaitian_mpi.train.computation import check_loss
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.elastic_run import ElasticRun
from kaitian_mpi.train.step import Step

Result = TypeVar("Result")


class OpenStep:
    """A step that the script makes of a batch: `backward`, then `finish`.

    The loss of a rank only makes the step fail: its samples come again, once the script has asked
    for the next batch. Every method is collective, unless stated otherwise.
    """

    def __init__(self, run: ElasticRun, share: Sequence[MicroBatch]) -> None:
        """Begin a step.

        Args:
            run: on an attempt.
            share: this rank's.
        """
        assert run.attempt is not None
        self._run, self._attempt = run, run.attempt
        self._attempt.trainer.begin(share)
        self.batch: Any = self._attempt.trainer.place(share[0])
        self._has_gradient = False
        self._is_finished = False
        self._failure: Exception | None = None

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradient of this rank's share, and sum it over the ranks.

        Raises:
            UserError: the loss is no tensor of one element, or there is a gradient already.
        """
        if self._has_gradient:
            raise UserError(
                "found a second training.backward() for one batch, needed one; add the losses up"
            )
        checked = check_loss(loss, self._attempt.trainer.counts)
        self._has_gradient = True
        self._try(lambda attempt: attempt.trainer.backward(checked))

    def finish(self) -> Step | None:
        """Apply the gradient, and do what follows a step.

        Returns:
            The step, also if a rank is lost in what follows it; None if it failed.

        Raises:
            UserError: there is no gradient to apply.
        """
        if self._is_finished:
            raise UserError("training.step() was called twice for one batch; call it once")
        if not self._has_gradient:
            raise UserError(
                "found training.step() without a gradient, needed training.backward(loss) before it"
            )
        self._is_finished = True
        enter_phase("the sum of gradients", waits=True)
        done = self._try(lambda attempt: attempt.trainer.finish())
        if done is not None:
            self._try(lambda attempt: attempt.step_done(done))
        return done

    def recover(self) -> bool:
        """Regroup if a rank was lost; return whether one was."""
        failure, self._failure = self._failure, None
        if failure is None:
            return False
        self._run.recover(failure)
        return True

    def check_finished(self) -> None:
        """Raise unless the step is finished. Not collective.

        Raises:
            UserError: it is not.
        """
        if not self._is_finished:
            raise UserError(
                "found a batch of which no step was made, needed training.backward(loss) and "
                "training.step() before what comes next"
            )

    def abandon(self) -> None:
        """Forget the step, if it is not finished; its samples come again. Not collective."""
        if not self._is_finished and self._run.attempt is self._attempt:
            self._attempt.trainer.abandon()

    def _try(self, work: Callable[[Attempt], Result]) -> Result | None:
        """Do something collective; after a loss, now or before, return None."""
        if self._failure is not None:
            return None
        try:
            return work(self._attempt)
        except Exception as error:
            if not self._run.membership.may_be_loss(error):
                self._run.fail(error)
                raise
            self._failure = error
            return None
