"""Any training on unlike devices: `Training`, which scripts and `kaitian-train` use alike."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.startup import init
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World, current_world
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.attempt import Attempt
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.elastic_run import ElasticRun
from kaitian_mpi.train.open_step import OpenStep
from kaitian_mpi.train.sinks import check_own_sinks
from kaitian_mpi.train.step import Step
from kaitian_mpi.train.summary import Summary
from kaitian_mpi.train.task import Task

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
        sinks: take what is measured, beside metrics.jsonl: one on each rank, of which that of the
            rank that writes the files is used, in a thread of its own. One that raises is not used
            any more, and one that is slow does not slow down the training.
        settings: fields of `TrainingConfig`, which are flags of `kaitian-train` as well.

    Raises:
        UserError: the task or a setting cannot be used, or another `Training` is still open.
    """

    def __init__(
        self,
        task: Task | Callable[[], Task],
        config: TrainingConfig | None = None,
        *,
        sinks: Sequence[MetricsSink] = (),
        **settings: Any,
    ) -> None:
        if _open:
            raise UserError("found a Training that is still open, needed it closed; call close()")
        is_task_or_function = isinstance(task, Task) or callable(task)
        if isinstance(task, nn.Module) or not is_task_or_function:
            raise UserError(f"Training: found a {type(task).__name__}, needed a Task")
        config = _make_config(config, settings)
        check_own_sinks(sinks)
        world = current_world() or init()
        self._open_step: OpenStep | None = None
        self._last_step: Step | None = None
        self._run = ElasticRun(partial(_as_task, task), config, world, self._closed, sinks)
        _open.append(self)
        register_close(self.close, ends_work=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A loop is left by sys.exit() as well, or with the generator that it is in.
        is_left = isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and not error.code and not _is_raised_inside(trace)
        )
        if error is None or is_left:
            self.close()
        else:
            self._run.leave(error)

    def __iter__(self) -> Iterator[Step]:
        """Train, and yield each step once it is done; after the last one, the results are written.

        On a rank that stands by, nothing is yielded until it replaces a lost one.

        Raises:
            UserError: the task has no loss, or the training is over.
        """
        self._check_open()
        if self._run.task.loss is None:
            raise UserError(
                "found a Task without loss, needed one to iterate over its Training; give "
                "Task(loss=...), or iterate over training.batches()"
            )
        while (share := self._run.next_share()) is not None:
            step = self._run.guarded(self._train, share)
            if step is not None:
                # Done for every rank, and so it stays if one is lost in what follows.
                self._run.guarded(self._attempt.step_done, step)
                self._enter_script()
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
        if self._run.task.loss is not None:
            raise UserError(
                "found a Task with a loss, needed one without for training.batches(); iterate over "
                "the Training itself, or leave Task(loss=...) out"
            )
        self._end_open_step()
        while (share := self._run.next_share()) is not None:
            step = self._run.guarded(OpenStep, self._run, share)
            if step is None:
                continue
            self._open_step = step
            self._enter_script()
            try:
                yield step.batch
            except GeneratorExit:  # the loop was left; another one may be open by now
                if self._open_step is step:
                    self._open_step = None
                step.abandon()
                raise
            self._open_step = None
            if not step.recover():
                step.check_finished()

    @property
    def model(self) -> nn.Module:
        """The model, which is trained in place: the same object before and after a loss."""
        return self._run.task.model

    @property
    def world(self) -> World:
        """All surviving ranks."""
        return self._run.membership.all_ranks

    @property
    def summary(self) -> Summary:
        """How the run stands, as in summary.json. Not collective."""
        return self._run.summary

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and a loss in the training's precision."""
        return self._run.computation.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradient of this rank's share, and sum it over the ranks, in the open form.

        Args:
            loss: the mean over the batch that `batches` yielded.

        Raises:
            UserError: the loss is no tensor of one element, or there is no batch to call this for.
        """
        self._needed_step("backward").backward(loss)
        self._enter_script()

    def step(self) -> bool:
        """Apply the gradient: clip it, step optimizers and schedulers, zero it, in the open form.

        Returns:
            Whether the step is done; False where a rank was lost: then the samples come again.

        Raises:
            UserError: there is no gradient to apply.
        """
        done = self._needed_step("step").finish()
        self._last_step = done or self._last_step
        self._enter_script()
        return done is not None

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
        task = self._run.task
        if task.validation is None or (task.metrics is None and task.loss is None):
            missing = "validation data" if task.validation is None else "metrics"
            raise UserError(f"found a Task without {missing}, needed it to evaluate")
        self._end_open_step()
        means = self._run.evaluate()
        self._enter_script()
        return means

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
        self._run.record(figures)

    def close(self) -> None:
        """End the training, wherever it is; if it has a run folder, `resume="auto"` continues it.

        Does nothing after the first call.
        """
        if self._open_step is not None and not self._run.is_closed:
            self._open_step.recover()
        self._run.stop()
        self._run.leave()

    def _train(self, share: Sequence[MicroBatch]) -> Step:
        self._last_step = self._attempt.trainer.train(share)
        return self._last_step

    def _enter_script(self) -> None:
        """Begin the phase of the script's own code, which may last."""
        done = self._last_step.number if self._last_step is not None else 0
        enter_phase("the script's own code", step=done, limited=False)

    @property
    def _attempt(self) -> Attempt:
        assert self._run.attempt is not None
        return self._run.attempt

    def _closed(self) -> None:
        unregister_close(self.close)
        if self in _open:
            _open.remove(self)

    def _check_open(self) -> None:
        if self._run.is_closed:
            raise UserError("found a Training that is closed, needed an open one; make a new one")

    def _end_open_step(self) -> None:
        """Regroup if a rank was lost in a step of the open form, before what comes next.

        Raises:
            UserError: the step is not finished.
        """
        if self._open_step is not None:
            self._open_step.check_finished()
            self._open_step.recover()

    def _needed_step(self, method: str) -> OpenStep:
        self._check_open()
        if self._open_step is None:
            raise UserError(
                f"found training.{method}() without a batch, needed it in a loop over "
                "training.batches(), once for each batch"
            )
        return self._open_step


def _is_raised_inside(trace: TracebackType | None) -> bool:
    """Return whether an exception comes from what the training calls, such as the model.

    Then the loop was not left: the other ranks may know nothing of it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(trace)][1:]
    package = __name__.partition(".")[0] + "."
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame in frames)


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
    if not isinstance(config, TrainingConfig):
        raise UserError(
            f"Training: config is a {type(config).__name__} and must be a TrainingConfig; give "
            "settings by name, such as Training(task, epochs=3)"
        )
    return replace(config, **settings)
