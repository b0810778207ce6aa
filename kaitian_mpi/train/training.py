"""Any training on different devices: `Training`, for scripts and `kaitian-train` alike."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.config.training import make_config
from kaitian_mpi.distributed.startup import init
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World, current_world, limited_as, slowed_as
from kaitian_mpi.observe.sink import MetricsSink, check_sinks
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.train.lockstep import Epoch, Lockstep
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.open_form import OpenForm
from kaitian_mpi.train.session import Session
from kaitian_mpi.train.step import Step
from kaitian_mpi.train.summary import Summary
from kaitian_mpi.train.task import JointTask, Task, as_task

_open: list[Training] = []


class Training(AbstractContextManager["Training"]):
    """Trains a task on all ranks of the job: fast on different devices, exact, surviving losses.

    It benchmarks the task on every rank, gives each rank the samples that make the step shortest,
    follows the ranks' speed, and saves, resumes and recovers what it trains. The gradient is that
    of the global batch, however it is divided: sum over the ranks of w_i / sum(w) times the rank's
    mean gradient, with w_i its samples, or what `Task.weight` returns.

    In the closed form it trains a step for each iteration::

        for step in training:
            print(step.number, step.loss)

    In the open form, for a task without a loss, the script computes it::

        for batch in training.batches():
            loss = my_loss(training.model(batch["x"]), batch["y"])
            training.backward(loss)
            training.step()

    Making it is cheap. At its first use (a loop, `evaluate`, `model` or `autocast`) it loads the
    data, benchmarks the ranks and resumes the run.

    Everything is collective over all ranks, unless stated otherwise. Use it as a context manager,
    or call `close`, so that ranks on standby are released however the loop ends.

    Args:
        task: what is trained; or a function that makes it, whose errors all ranks then share.
        config: the settings; None: those given by name.
        sinks: `MetricsSink` objects that receive the metrics in addition to metrics.jsonl. Pass
            them on every rank; only those of the rank that writes the files are used, each in its
            own thread. One that raises is no longer used, and one that is slow does not slow down
            the training.
        settings: fields of `TrainingConfig`, which are flags of `kaitian-train` as well.

    Raises:
        UserError: the task or a setting cannot be used, or another `Training` is still open.
    """

    def __init__(
        self,
        task: Task | Callable[[], Task] | JointTask,
        config: TrainingConfig | None = None,
        *,
        sinks: Sequence[MetricsSink] = (),
        **settings: Any,
    ) -> None:
        if _open:
            raise UserError("another Training is open; call close() first")
        is_task = isinstance(task, Task | JointTask) or callable(task)
        if isinstance(task, nn.Module) or not is_task:
            raise UserError(f"Training() takes a Task, not a {type(task).__name__}")
        config = make_config(config, settings)
        check_sinks(sinks)
        world = current_world() if dist.is_initialized() else None
        membership = Membership(world or init())
        slowdown = config.emulate_slowdown
        memory = config.emulate_memory
        membership.change_world(lambda world: slowed_as(world, slowdown))
        membership.change_world(lambda world: limited_as(world, memory))
        config = replace(config, emulate_slowdown=membership.all_ranks.emulation.slowdown)
        self._session = Session(partial(as_task, task), config, membership, sinks)
        self._lockstep = Lockstep(self._session)
        self._open_form = OpenForm(self._session, self._lockstep)
        _open.append(self)
        self._session.at_end.callback(_open.remove, self)
        register_close(self.close, ends_work=True)
        self._session.at_end.callback(unregister_close, self.close)

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # sys.exit() leaves a loop as well, and so does closing the generator that it is in.
        is_left = isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and not error.code and not _is_raised_inside(trace)
        )
        if error is None or is_left:
            self.close()
        else:
            self._session.end(error)

    def __iter__(self) -> Iterator[Step]:
        """Train, and yield each step once it is done; after the last one, write the results.

        On a rank on standby, nothing is yielded until it replaces a lost one.

        Raises:
            UserError: the task has no loss, or the training is closed.
        """
        if self._session.start().setup.task.loss is None:
            raise UserError(
                "iterating over a Training requires Task(loss=...); give it, or iterate over "
                "training.batches()"
            )
        return self._lockstep.steps()

    def run(self) -> None:
        """Train to the end, with nothing of the script's between two steps.

        New values of parameters that other ranks have stepped then come while the next step
        computes, also in a job that survives lost ranks. Otherwise it is as a loop with an empty
        body.

        Raises:
            UserError: as iterating does.
        """
        self._lockstep.expect_no_script()
        for _ in self:
            pass

    def batches(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch, on its device.

        Call `backward` and `step` for each. After a `step` that returned False, the same samples
        are repeated, divided among the surviving ranks.

        Raises:
            UserError: the task has a loss, or the training is closed, or `step` was not called for
                the batch before.
        """
        yield from self._open_form.batches(is_split=False)

    def micro_batches(self) -> Iterator[Iterator[Any]]:
        """Yield the micro-batches of this rank's share of each global batch, as an iterator.

        Each has at most `micro_batch_size` samples, and is on the device once it is reached. Call
        `backward` for each micro-batch with the mean over it, and `step` after the last. The
        gradient is that of the global batch, as with `batches`.

        Raises:
            UserError: as for `batches`.
        """
        yield from self._open_form.batches(is_split=True)

    def epochs(self) -> Iterator[Epoch]:
        """Yield each epoch, or the rest of one, to be iterated over for what `batches` yields.

        Or, for a task with a loss, for the steps that are done. The script may evaluate and step
        schedulers of its own between two epochs; the run is saved after that. An epoch whose loop
        is left is over, and its other samples are left out.

        Raises:
            UserError: the training is closed, or nothing of an epoch was trained.
        """
        session = self._session
        session.start()
        self._open_form.check_finished()
        begin = self._lockstep.begin_epoch
        while (epoch := session.until_done(begin, self._open_form.make_epoch)) is not None:
            self._lockstep.enter_script()
            yield epoch
            self._open_form.check_finished()

    @property
    def model(self) -> nn.Module:
        """The model, which is trained in place: the same object before and after a loss.

        Collective only if it is the first use of the training.
        """
        return self._session.prepared.setup.task.model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The task's optimizers. Collective only if it is the first use of the training."""
        return self._session.prepared.state.optimizers

    @property
    def world(self) -> World:
        """All surviving ranks. Not collective."""
        return self._session.membership.all_ranks

    @property
    def summary(self) -> Summary:
        """The state of the run, as in summary.json; empty before the first use. Not collective."""
        run = self._session.run
        return Summary() if run is None else run.summary

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and a loss in the training's precision."""
        return self._session.prepared.state.computation.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradient of this rank's share, and sum it over the ranks, in the open form.

        Args:
            loss: the mean over the batch, or micro-batch, that was yielded.

        Raises:
            UserError: the loss is not a tensor of one element, or there is no batch for it.
        """
        self._open_form.backward(loss)

    def step(self) -> bool:
        """Apply the gradient: clip it, step optimizers and schedulers, zero it, in the open form.

        Returns:
            False if a rank was lost: nothing was changed, and the samples are repeated.

        Raises:
            UserError: there is no gradient to apply.
        """
        return self._open_form.step()

    @property
    def has_samples(self) -> bool:
        """Whether the batch that was yielded last is of this rank's own samples. Not collective.

        False if the step has fewer samples than ranks, say, and this rank's share of it is empty:
        the batch then has other samples, so that the model can compute, and leaves no trace in the
        training. A script leaves it out of figures that it keeps itself.

        Raises:
            UserError: there is no batch, outside of a loop over `batches`.
        """
        return self._open_form.has_samples()

    @property
    def steps_done(self) -> int:
        """The steps of the run that are done, those of earlier jobs included.

        Collective only if it is the first use of the training.
        """
        return self._session.prepared.state.progress.step

    @property
    def last_step(self) -> Step | None:
        """The last step that is done; None before the first. Not collective."""
        return self._lockstep.last_step

    def evaluate(self) -> dict[str, float]:
        """Return the means of the task's metrics over its validation data, by name.

        Each sample counts once, whatever the shares; the same on every rank. Once the run is
        finished, returns the result of its last evaluation.

        Raises:
            UserError: the task has no validation data, or no loss and no metrics.
        """
        session = self._session
        task = session.start().setup.task
        if task.validation is None:
            raise UserError("evaluate() requires Task(validation=...)")
        if task.metrics is None and task.loss is None:
            raise UserError("evaluate() requires Task(metrics=...)")
        self._open_form.check_finished()
        means = session.until_done(self._lockstep.evaluate)
        if means is None:
            finished = self.summary.finished
            means = dict((self.summary.validation or {}) if finished else session.evaluated)
        self._lockstep.enter_script()
        return means

    def log(self, **values: float) -> None:
        """Record the script's own metrics with the next line of metrics.jsonl. Not collective.

        Args:
            values: numbers, or tensors of one element, by name. Rank 0's are written.
        """
        self._session.check_open()
        try:
            self._session.logged.update({name: float(value) for name, value in values.items()})
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"training.log({', '.join(values)}) takes numbers or tensors of one element: "
                f"{error}"
            ) from error

    def close(self) -> None:
        """End the training at any point; if it has a run folder, `resume="auto"` continues it.

        Does nothing after the first call.
        """
        session = self._session
        if not session.is_closed and session.run is not None:
            session.until_done(self._lockstep.stop)
        session.end()


def _is_raised_inside(trace: TracebackType | None) -> bool:
    """Return whether an exception comes from what the training calls, such as the model.

    Then the loop was not left: the other ranks may know nothing of it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(trace)][1:]
    package = __name__.partition(".")[0] + "."
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame in frames)
