"""Any training on unlike devices: `Training`, which scripts and `kaitian-train` use alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from kaitian_mpi.backend.startup import init
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.data.batches import MicroBatch
from kaitian_mpi.elastic.membership import Membership
from kaitian_mpi.engine.computation import check_loss
from kaitian_mpi.engine.task import Task
from kaitian_mpi.errors import AgreedError, StorageError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World, current_world
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.signals import handle_signals, is_handled
from kaitian_mpi.runtime.watchdog import (
    enter_phase,
    is_watched,
    setup_limit,
    start_watchdog,
    stop_watchdog,
)
from kaitian_mpi.steps.step import Step
from kaitian_mpi.training.attempt import Attempt
from kaitian_mpi.training.run import Run
from kaitian_mpi.training.session import open_run
from kaitian_mpi.training.summary import Summary

Result = TypeVar("Result")

_open: list[Training] = []


class Training:
    """Trains a task on all ranks of the job: fast on unlike devices, exact, and surviving losses.

    It benchmarks the task on every rank, gives each rank the samples that make the step shortest,
    follows the ranks' speed, and saves, resumes and recovers what it trains. The gradient is that
    of the global batch, however it is divided: sum over the ranks of w_i / sum(w) times the rank's
    mean gradient, with w_i its samples, or what `Task.weight` says.

    In the closed form it trains a step each time that it is asked for the next one::

        for step in training:
            print(step.number, step.loss)

    In the open form, for a task without a loss, the script computes it::

        for batch in training.batches():
            loss = my_loss(training.model(batch["x"]), batch["y"])
            training.backward(loss)
            training.step()

    Everything is collective over all ranks, except where it says otherwise. Use it as a context,
    or call `close`: so ranks on standby are released wherever the loop ends.

    Args:
        task: what is trained; or a function that makes it, whose errors all ranks then share.
        config: the settings; None: those given by name.
        settings: fields of `TrainingConfig`, which are flags of `kaitian-train` as well.

    Raises:
        UserError: the task or a setting cannot be used, or another `Training` is still open.
    """

    def __init__(
        self,
        task: Task | Callable[[], Task],
        config: TrainingConfig | None = None,
        **settings: Any,
    ) -> None:
        self._is_closed = True
        if _open:
            raise UserError("found a Training that is still open, needed it closed; call close()")
        is_task_or_function = isinstance(task, Task) or callable(task)
        if isinstance(task, nn.Module) or not is_task_or_function:
            raise UserError(f"Training: found a {type(task).__name__}, needed a Task")
        config = _make_config(config, settings)
        world = current_world() or init()
        slowdown = config.emulate_slowdown or world.emulation.slowdown
        config = replace(config, emulate_slowdown=slowdown)
        self._script_slowdown = world.script_slowdown
        self._attempt: Attempt | None = None
        self._open_step: _OpenStep | None = None
        self._last_step: Step | None = None
        self._unrecorded: dict[str, float] = {}
        self._owns_watchdog = _watch_process(config)
        self._membership = Membership(world)
        self._script_slowdown.pause()  # the trainer slows down each of its steps itself
        try:
            run = open_run(partial(_as_task, task), config, self._membership)
        except BaseException:
            self._stop_watching()
            self._script_slowdown.resume()
            raise
        self._task, self._run, self._summary = run
        self._is_done, self._is_closed = self._run is None, False
        _open.append(self)
        register_close(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)

    def __iter__(self) -> Iterator[Step]:
        """Train, and yield each step once it is done; after the last one, the results are written.

        On a rank that stands by, nothing is yielded until it replaces a lost one.

        Raises:
            UserError: the task has no loss, or the training is over.
        """
        self._check_open()
        if self._task.loss is None:
            raise UserError(
                "found a Task without loss, needed one to iterate over its Training; give "
                "Task(loss=...), or iterate over training.batches()"
            )
        while (share := self._next_share()) is not None:
            step = self._guarded(self._train_share, share)
            if step is not None:
                self._guarded(self._follow_up, step)
                enter_phase("the script's own code", step=step.number, limited=False)
                yield step

    def batches(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch, on its device.

        `backward` and `step` are to be called for each. After a `step` that returned False, the
        same samples come again, divided among the surviving ranks.

        Raises:
            UserError: the task has a loss, or the training is over, or no step was made of the
                batch before.
        """
        self._check_open()
        if self._task.loss is not None:
            raise UserError(
                "found a Task with a loss, needed one without for training.batches(); iterate over "
                "the Training itself, or leave Task(loss=...) out"
            )
        self._check_no_open_step()
        while (share := self._next_share()) is not None:
            batch = self._guarded(self._begin_open_step, share)
            if (step := self._open_step) is None:
                continue
            enter_phase("the script's own code", limited=False)
            try:
                yield batch
            except GeneratorExit:  # the loop was left
                self._abandon(step)
                raise
            was_lost = self._recover_open_step()
            self._open_step = None
            if not (was_lost or step.is_made):
                raise _no_step_made()

    @property
    def model(self) -> nn.Module:
        """The model, which is trained in place: the same object before and after a loss."""
        return self._task.model

    @property
    def world(self) -> World:
        """All surviving ranks."""
        return self._membership.all_ranks

    @property
    def summary(self) -> Summary:
        """How the run stands, as in summary.json. Not collective."""
        return self._summary if self._run is None else self._run.summary

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and a loss in the training's precision."""
        assert self._run is not None, "a finished run trains no batch"
        return self._run.state.computation.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradient of this rank's share, and sum it over the ranks, in the open form.

        Args:
            loss: the mean over the batch that `batches` yielded.

        Raises:
            UserError: the loss is no tensor of one element, or there is no batch to call this for.
        """
        step = self._needed_step("backward")
        if step.has_gradient:
            raise UserError(
                "found a second training.backward() for one batch, needed one; add the losses up"
            )
        assert self._attempt is not None
        checked = check_loss(loss, self._attempt.trainer.counts)
        step.has_gradient = True
        self._trying(step, lambda attempt: attempt.trainer.backward(checked))

    def step(self) -> bool:
        """Apply the gradient: clip it, step optimizers and schedulers, zero it, in the open form.

        Returns:
            Whether the step is done; False where a rank was lost: then the samples come again.

        Raises:
            UserError: there is no gradient to apply.
        """
        step = self._needed_step("step")
        if not step.has_gradient:
            raise UserError(
                "found training.step() without a gradient, needed training.backward(loss) before it"
            )
        step.is_made = True
        done = self._trying(step, lambda attempt: attempt.trainer.finish())
        if done is None:
            return False
        self._last_step = done
        self._trying(step, lambda attempt: attempt.step_done(done))
        return True  # also if a rank is lost in what follows a step: it has done its step

    @property
    def last_step(self) -> Step | None:
        """The step that was done last; None before the first. Not collective."""
        return self._last_step

    def evaluate(self) -> dict[str, float]:
        """Return the means of the task's metrics over its validation data, by name.

        Each sample counts once, whatever the shares; the same on every rank. After the training's
        own evaluation of the same step, that one's result.

        Raises:
            UserError: the task has no validation data, or no loss and no metrics.
        """
        self._check_open()
        task = self._task
        if task.validation is None or (task.metrics is None and task.loss is None):
            missing = "validation data" if task.validation is None else "metrics"
            raise UserError(f"found a Task without {missing}, needed it to evaluate")
        self._check_no_open_step()
        self._recover_open_step()
        while not self._is_done:
            result = self._guarded(self._evaluate_now)
            if result is not None:
                return result
        return dict(self.summary.validation or {})

    def log(self, **values: float) -> None:
        """Record figures of the script's own, with the next line of metrics. Not collective.

        Args:
            values: numbers, or tensors of one element, by name. Rank 0's are written.
        """
        self._check_open()
        try:
            figures = {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"found training.log({', '.join(values)}) with {error}, needed numbers or tensors "
                "of one element"
            ) from error
        if self._attempt is None:
            self._unrecorded.update(figures)
        else:
            self._attempt.record(figures)

    def close(self) -> None:
        """End the training, wherever it is; if it has a run folder, `resume="auto"` continues it.

        Does nothing after the first call.
        """
        if not self._is_closed:
            self._recover_open_step()
        while not (self._is_closed or self._is_done):
            self._guarded(self._stop)
        self._leave()

    def _next_share(self) -> Sequence[MicroBatch] | None:
        """Return this rank's share of the next step; None where the training is done."""
        while not self._is_done:
            share = self._guarded(self._advance)
            if share is not None:
                return share
        return None

    def _advance(self) -> Sequence[MicroBatch] | None:
        attempt = self._ready()
        share = None if attempt is None else attempt.next_share()
        if share is None:
            self._finish(attempt)
        return share

    def _ready(self) -> Attempt | None:
        """Return what trains on the active ranks; None once the work is done without this rank."""
        assert self._run is not None
        if self._attempt is None:
            world = self._membership.wait_until_active()
            if world is not None:
                self._attempt = Attempt(self._run, world)
                self._attempt.record(self._unrecorded)
                self._unrecorded = {}
        return self._attempt

    def _finish(self, attempt: Attempt | None) -> None:
        """Write the results, and let the ranks on standby leave."""
        run = self._run
        assert run is not None
        if attempt is not None:
            attempt.finish()
            self._membership.commit()
        self._membership.release()
        if self._membership.has_standby:
            self._share_results(run)
            self._membership.commit()
        self._is_done = True
        if run.fault:  # only now, for the ranks on standby would wait for ever
            raise AgreedError(run.fault, StorageError.exit_code)

    def _share_results(self, run: Run) -> None:
        """Give the ranks that stood by the weights and the summary, for the script may use both."""
        world = self._membership.all_ranks
        run.state.sync_to_latest(world)
        known = gather_values(world.comm, run.summary.to_json())
        finished = (summary for summary in known if summary.get("finished"))
        run.summary = Summary.from_json(next(finished, known[world.rank]))

    def _stop(self) -> None:
        """Leave the run as it is, and let the ranks on standby leave."""
        if self._membership.wait_until_active() is not None:
            if self._attempt is not None or self._membership.losses:
                attempt = self._ready()
                assert attempt is not None
                attempt.save()
                attempt.close()
            self._membership.commit()
        self._membership.release()
        self._is_done = True

    def _train_share(self, share: Sequence[MicroBatch]) -> Step:
        assert self._attempt is not None
        self._last_step = self._attempt.trainer.train(share)
        return self._last_step

    def _follow_up(self, step: Step) -> None:
        """Do what follows a step that is done, and stays so if a rank is lost meanwhile."""
        assert self._attempt is not None
        self._attempt.step_done(step)

    def _begin_open_step(self, share: Sequence[MicroBatch]) -> Any:
        assert self._attempt is not None
        trainer = self._attempt.trainer
        trainer.begin(share)
        batch = trainer.place(share[0])
        self._open_step = _OpenStep()
        return batch

    def _evaluate_now(self) -> dict[str, float] | None:
        attempt = self._ready()
        if attempt is None:
            self._finish(None)
            return None
        return dict(attempt.trainer.evaluate().means)

    def _guarded(self, work: Callable[..., Result], *arguments: Any) -> Result | None:
        """Do something collective; after a loss, regroup and return None."""
        try:
            return work(*arguments)
        except Exception as error:
            failure = error
        self._recover(failure)  # outside the handler, which would keep what the error refers to
        return None

    def _recover(self, failure: Exception) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close(failure)
        try:
            self._membership.recover(failure)
        except Exception:
            self._leave(failure)
            raise

    def _trying(self, step: _OpenStep, work: Callable[[Attempt], Result]) -> Result | None:
        """Do something collective in an open step; after a loss, return None."""
        assert self._attempt is not None
        if step.failure is not None:
            return None
        try:
            return work(self._attempt)
        except Exception as error:
            if not self._membership.may_be_loss(error):
                self._leave(error)
                raise
            step.failure = error
            return None

    def _recover_open_step(self) -> bool:
        """Regroup after a loss in the open step; return whether there was one."""
        step = self._open_step
        if step is None or step.failure is None:
            return False
        failure, step.failure = step.failure, None
        self._recover(failure)
        return True

    def _leave(self, error: BaseException | None = None) -> None:
        """Let go of everything; no rank is waited for."""
        unregister_close(self.close)
        if self in _open:
            _open.remove(self)
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close(error or UserError("the training is closed"))
        self._stop_watching()
        if not self._is_closed:
            self._script_slowdown.resume()
        self._is_closed = True

    def _stop_watching(self) -> None:
        if self._owns_watchdog:
            stop_watchdog()
        self._owns_watchdog = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("found a Training that is closed, needed an open one; make a new one")

    def _check_no_open_step(self) -> None:
        step = self._open_step
        if step is not None and not step.is_made:
            raise _no_step_made()

    def _abandon(self, step: _OpenStep) -> None:
        """Forget a batch that the script has left the loop with."""
        if self._open_step is step:
            self._open_step = None
            if self._attempt is not None and not step.is_made:
                self._attempt.trainer.abandon()

    def _needed_step(self, method: str) -> _OpenStep:
        self._check_open()
        if self._open_step is None:
            raise UserError(
                f"found training.{method}() without a batch, needed it in a loop over "
                "training.batches(), once for each batch"
            )
        return self._open_step


@dataclass
class _OpenStep:
    """A step that the script is making."""

    has_gradient: bool = False
    is_made: bool = False
    failure: Exception | None = None
    """The loss of a rank, as this rank has noticed it."""


def _no_step_made() -> UserError:
    return UserError(
        "found a batch of which no step was made, needed training.backward(loss) and "
        "training.step() before what comes next"
    )


def _as_task(task: Task | Callable[[], Task]) -> Task:
    made = task if isinstance(task, Task) else task()
    if not isinstance(made, Task):
        raise UserError(
            f"Training: found a function that returned a {type(made).__name__}, needed "
            "one that returns a Task"
        )
    return made


def _make_config(config: TrainingConfig | None, settings: dict[str, Any]) -> TrainingConfig:
    names = [field.name for field in fields(TrainingConfig)]
    for name in settings:
        if name not in names:
            raise UserError(
                f"Training: found a setting {name!r}, needed one of {', '.join(sorted(names))}"
            )
    if config is None:
        return TrainingConfig(**settings)
    return replace(config, **settings)


def _watch_process(config: TrainingConfig) -> bool:
    """Have this rank watched, and its signals handled, unless its program does so already.

    Returns:
        Whether a watchdog has been started.
    """
    if not is_handled():
        handle_signals(Path(sys.argv[0]).name or "python")
    return not is_watched() and start_watchdog(setup_limit(config.step_timeout)) is not None
