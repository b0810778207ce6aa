"""Keeps the ranks' scripts together: all begin the same step, epoch or evaluation, or stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.session import Session
from kaitian_mpi.train.step import Step
from kaitian_mpi.train.step_times import Call


@dataclass(frozen=True)
class Epoch:
    """An epoch, or the rest of one, of `Training.epochs`; its length is the number of its steps.

    Iterating over it again continues, until the next epoch.
    """

    number: int
    """From 0."""
    steps: int
    """The steps that remain when it begins."""
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


class Lockstep:
    """Takes all ranks through steps, epochs and evaluations, as the script asks for them.

    Every method is collective, unless stated otherwise.

    Attributes:
        last_step: the last step that is done; None before the first.
        splits_shares: whether the script asks for its shares in micro-batches.
    """

    def __init__(self, session: Session) -> None:
        self.last_step: Step | None = None
        self.splits_shares = False
        self._session = session
        self._script_is_absent = False
        self._epoch: Epoch | None = None
        self._must_agree = False  # after a loss, until all ranks are at the next step
        self._script_ran = False  # since the loop began, or the ranks have agreed

    def steps(self, epoch: Epoch | None = None) -> Iterator[Step]:
        """Train, and yield each step once it is done; to the end of the epoch, or of the run."""
        session = self._session
        while (share := self.next_share(epoch)) is not None:
            step = self.follow(session.guarded(session.current_loop.train, share))
            if step is not None:
                self.enter_script()
                yield step

    def next_share(self, epoch: Epoch | None) -> Sequence[MicroBatch] | None:
        """Return this rank's share of the next step; None if the epoch or the run is done."""
        session = self._session
        state = session.prepared.state
        while not session.is_done and (epoch is None or epoch.is_current(state.progress)):
            share = session.guarded(self._advance, epoch is None)
            if share is not None:
                return share
        return None

    def follow(self, step: Step | None) -> Step | None:
        """Do what follows a step that all ranks have done, also if one is lost meanwhile."""
        session = self._session
        if step is not None:
            self.last_step = step
            session.guarded(session.current_loop.step_done, step, not self._script_is_absent)
            if session.loop is None and not session.prepared.state.partition.is_whole:
                session.until_done(self._ready_loop)  # the script may use the weights
        return step

    def begin_epoch(self, make: Callable[[Loop], Epoch]) -> Epoch | None:
        """End the epoch before, if there is one; return the next, or None if the run is done."""
        loop = self._ready_loop()
        if loop is None:
            return None
        if self._epoch is not None and self._epoch.is_current(loop.progress):
            if not loop.progress.position:
                raise UserError("iterate over each epoch that training.epochs() yields")
            loop.skip_epoch()
            self._script_ran = True  # other ranks have not skipped it yet
        if self._agree(loop, Call.BEGIN_EPOCH) == Call.STOP:
            return None
        if loop.progress.epoch_is_over or loop.progress.lacks_results:
            self._end_epoch(loop)
        if loop.progress.is_done:
            self._finish(loop)
            return None
        self._epoch = make(loop)
        return self._epoch

    def evaluate(self) -> dict[str, float] | None:
        """Return the means over the validation data; None if the run was finished without it."""
        loop = self._ready_loop()
        if loop is None:
            return None
        self._agree(loop, Call.EVALUATE)
        return self._session.evaluate()

    def stop(self) -> None:
        """Save the run as it stands, for another job; finish it if its last step is done."""
        session = self._session
        is_active = session.membership.wait_until_active() is not None
        if is_active and (session.loop is not None or session.membership.losses):
            loop = self._ready_loop()
            assert loop is not None
            self._agree(loop, Call.STOP)
            if not session.is_done:
                self._end_loop(loop)
        else:
            session.end_standby(is_active)

    def expect_no_script(self) -> None:
        """Expect no code of the script between two steps. Not collective."""
        self._script_is_absent = True

    def enter_script(self) -> None:
        """Begin the phase of the script's own code, which may last. Not collective."""
        done = self.last_step.number if self.last_step is not None else 0
        enter_phase("the script's own code", step=done, limited=False)
        self._script_ran = True

    def split_shares(self, is_wanted: bool) -> None:
        """Split shares into micro-batches from the next step on, or no longer. Not collective."""
        self.splits_shares = is_wanted
        if self._session.loop is not None:
            self._session.loop.split_shares(is_wanted)

    def _advance(self, crosses_epochs: bool = True) -> Sequence[MicroBatch] | None:
        session = self._session
        loop = self._ready_loop()
        if loop is None or self._agree(loop, Call.TRAIN) == Call.STOP:
            return None
        loop.engine.script_has_run()
        session.saving.save_due(script_has_run=not self._script_is_absent)
        is_saved = session.saving.save_to_end()
        if loop.is_outdated and not is_saved:
            session.end_loop()
            return None
        share = None if is_saved else loop.next_share(crosses_epochs)
        if is_saved or loop.progress.is_done:
            self._finish(loop, is_saved)
        return share

    def _ready_loop(self) -> Loop | None:
        """Return the loop of the active ranks; None if the work was done without this rank."""
        session = self._session
        if session.loop is None and session.begin_loop():
            self._must_agree = bool(session.membership.losses)
            self._script_ran = False
            if self.splits_shares:
                session.current_loop.split_shares(True)
        return session.loop

    def _agree(self, loop: Loop, call: Call) -> Call:
        """Agree with the other ranks on the next call; return this rank's, or STOP with theirs.

        After a loss, a rank that replaces the lost one begins its script, while the others may be
        anywhere in theirs. So until all are at the next step, each evaluates whenever one of them
        does, and all stop if one does. The joining rank gets the state that the other scripts have.
        """
        run = self._session.prepared
        while self._must_agree:
            enter_phase("the other ranks' next calls", waits=True, limited=False)
            gathered = gather_values(loop.world.comm, (call, run.is_joining, self._script_ran))
            calls, are_joining, scripts_ran = zip(*gathered, strict=True)
            joining = [rank for rank, is_joining in enumerate(are_joining) if is_joining]
            if any(scripts_ran) and 0 < len(joining) < len(calls):
                loop.copy_state(joining)
            self._script_ran = False
            if not joining or set(calls) == {Call.TRAIN}:
                self._must_agree = False
                run.joined()
            elif Call.EVALUATE in calls and call != Call.EVALUATE:
                loop.evaluate()
            elif Call.STOP in calls and call != Call.EVALUATE:
                self._end_loop(loop)
                return Call.STOP
            elif call != Call.TRAIN:
                break
        if not self._must_agree:
            is_over = loop.progress.has_all_steps and call != Call.EVALUATE
            loop.exchange.announce(Call.FINISH if is_over else call, loop.progress.step)
        return call

    def _end_epoch(self, loop: Loop) -> None:
        """End an epoch after the script's own code for it."""
        loop.progress.script_is_done = True
        self._session.saving.save_due()
        loop.end_epoch()

    def _end_loop(self, loop: Loop) -> None:
        loop.undo()
        if loop.progress.epoch_is_over:  # the script has left its loop over the epochs
            self._end_epoch(loop)
        elif loop.progress.has_all_steps:  # the script's loop asked for no more than there are
            loop.next_share()
        if loop.progress.is_done:
            self._finish(loop)
            return
        self._session.saving.save_and_stop()
        loop.close()
        self._session.end_standby(is_active=True)

    def _finish(self, loop: Loop, is_saved: bool = False) -> None:
        loop.close()
        if not is_saved:
            self._session.saving.write_results()
            for observer in loop.observers:
                observer.run_finished()
        self._session.end_standby(is_active=True)
