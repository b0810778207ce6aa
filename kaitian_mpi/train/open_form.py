"""The open form: a script's own loop over batches, in which it computes the loss itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.lockstep import Epoch, Lockstep
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.session import Session
from kaitian_mpi.train.step_times import Call
from kaitian_mpi.train.task import check_loss


class OpenStep:
    """A step of the open form, from its batch on.

    Attributes:
        loop: no longer the training's if a rank was lost; the step is then lost, too.
        is_finished: whether the script has ended it.
        has_samples: whether the batch that was yielded last has samples that count.
    """

    def __init__(self, loop: Loop, micro_batches: Sequence[MicroBatch]) -> None:
        """Begin a step with this rank's micro-batches. Collective."""
        self._micro_batches = list(micro_batches)
        self._left = loop.engine.begin(self._micro_batches)
        self.loop = loop
        self.is_finished = False
        self.has_samples = False
        self._current: int | None = None
        self._has_begun = False  # its backward

    def micro_batches(self) -> Iterator[Any]:
        """Yield the remaining micro-batches, on the device; computing begins with the first."""
        self.loop.engine.step.start_clock()
        while self._left:
            if self._current is not None:
                raise UserError("call training.backward(loss) for each micro-batch")
            self._current = self._left.pop(0)
            self.has_samples = self._micro_batches[self._current].samples > 0
            yield self.loop.engine.place(self._micro_batches[self._current])

    def check(self, loss: Any) -> torch.Tensor:
        """Check that there is a micro-batch whose gradient is missing, and its loss."""
        if self._current is None:
            raise UserError(
                "training.backward() was called twice for one batch; add the losses, and call it "
                "once"
            )
        return check_loss(loss, needs_gradient=self.loop.engine.step.weights[self._current] > 0)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the current micro-batch; of the last one, sum over the ranks."""
        assert self._current is not None
        index = self._current
        self._current = None
        if not self._has_begun:  # else the others would wait for a rank that leaves the step out
            self._has_begun = True
            self.loop.exchange.announce(Call.SUM, self.loop.progress.step)
        self.loop.engine.backward(loss, index, is_last=not self._left)

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


class OpenForm:
    """Yields batches, and has the script's calls for each do their part of the step.

    Every method is collective, unless stated otherwise.
    """

    def __init__(self, session: Session, lockstep: Lockstep) -> None:
        self._session = session
        self._lockstep = lockstep
        self._step: OpenStep | None = None

    def make_epoch(self, loop: Loop) -> Epoch:
        """Return the epoch that a loop is in. Not collective."""
        task = self._session.prepared.setup.task
        batches, micro_batches = partial(self.batches, False), partial(self.batches, True)
        train = batches if task.loss is None else self._lockstep.steps
        return Epoch(loop.progress.epoch, loop.steps_in_epoch, task.data, train, micro_batches)

    def batches(self, is_split: bool, epoch: Epoch | None = None) -> Iterator[Any]:
        """Yield this rank's share of each global batch, or, if `is_split`, its micro-batches.

        Raises:
            UserError: the task has a loss, or `step` was not called for the batch before.
        """
        session = self._session
        if session.start().setup.task.loss is not None:
            raise UserError(
                "training.batches() and micro_batches() are for a Task without a loss; iterate "
                "over the Training itself or its epochs, or omit Task(loss=...)"
            )
        self.check_finished()
        self._lockstep.split_shares(is_split)
        while (share := self._lockstep.next_share(epoch)) is not None:
            batch = session.guarded(self._begin, share)
            step = self._step
            if step is None:
                continue
            self._lockstep.enter_script()
            try:
                yield batch
            except GeneratorExit:  # the loop was left; another one may be open by now
                if self._step is step:
                    self._step = None
                if session.loop is step.loop and not step.is_finished:
                    step.loop.undo()
                raise
            try:
                self.check_finished()
            finally:
                self._step = None

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the current batch or micro-batch; the last one's is summed."""
        step = self._current("training.backward()")
        self._session.guarded(step.backward, step.check(loss))
        self._lockstep.enter_script()

    def step(self) -> bool:
        """Apply the gradient; return False if a rank was lost: the samples are then repeated."""
        step = self._current("training.step()")
        step.finish()
        done = None
        if self._session.loop is step.loop:
            enter_phase("the sum of gradients", waits=True)
            done = self._lockstep.follow(self._session.guarded(step.loop.finish))
        self._lockstep.enter_script()
        return done is not None

    def has_samples(self) -> bool:
        """Return whether the current batch has samples of this rank's own. Not collective."""
        self._session.check_open()
        if self._step is None:
            raise UserError("read training.has_samples in a loop over training.batches()")
        return self._step.has_samples

    def check_finished(self) -> None:
        """Check that the current step is finished, before what comes next. Not collective."""
        step = self._step
        if step is not None and self._session.loop is step.loop and not step.is_finished:
            rank = self._session.membership.all_ranks.info.world_rank
            raise UserError(
                "call training.backward(loss) and training.step() for each batch before what comes "
                f"next (rank {rank}, step {step.loop.progress.step + 1})"
            )

    def _begin(self, share: Sequence[MicroBatch]) -> Any:
        step = OpenStep(self._session.current_loop, share)
        batches = step.micro_batches()
        batch = batches if self._lockstep.splits_shares else next(batches)
        self._step = step
        return batch

    def _current(self, call: str) -> OpenStep:
        self._session.check_open()
        if self._step is None:
            raise UserError(f"call {call} once for each batch, in a loop over training.batches()")
        return self._step
