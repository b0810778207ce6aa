"""Any training on different devices: `Training`, for scripts and `kaitian-train` alike."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.config.training import make_config
from kaitian_mpi.distributed.startup import init
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World, current_world, limited_as, slowed_as
from kaitian_mpi.observe.console import set_quiet
from kaitian_mpi.observe.sink import MetricsSink, check_sinks
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import Recorder, start_recording, stop_recording
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.signals import handle_signals
from kaitian_mpi.runtime.watchdog import (
    current_watchdog,
    enter_phase,
    setup_limit,
    start_watchdog,
    stop_watchdog,
)
from kaitian_mpi.train.begin_loop import begin_loop
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.open_form import Epoch, OpenStep
from kaitian_mpi.train.run import Run, start
from kaitian_mpi.train.saving import Saving
from kaitian_mpi.train.step import Call, Step
from kaitian_mpi.train.summary import Summary
from kaitian_mpi.train.task import Task, as_task

Result = TypeVar("Result")

_open: list[Training] = []
_OUT_OF_MEMORY = (
    "{} is out of memory. Set a smaller micro_batch_size, or leave it to the benchmark (balance "
    "adaptive, micro_batch_size 0); or use a smaller global batch, precision bf16, layout auto "
    "(docs/large-models.md), or other devices"
)


class Training:
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
        task: Task | Callable[[], Task],
        config: TrainingConfig | None = None,
        *,
        sinks: Sequence[MetricsSink] = (),
        **settings: Any,
    ) -> None:
        if _open:
            raise UserError("another Training is open; call close() first")
        if isinstance(task, nn.Module) or not (isinstance(task, Task) or callable(task)):
            raise UserError(f"Training() takes a Task, not a {type(task).__name__}")
        config = make_config(config, settings)
        check_sinks(sinks)
        world = current_world() if dist.is_initialized() else None
        self._membership = Membership(world or init())
        self._membership.change_world(lambda world: slowed_as(world, config.emulate_slowdown))
        self._membership.change_world(lambda world: limited_as(world, config.emulate_memory))
        world = self._membership.all_ranks
        self._config = replace(config, emulate_slowdown=world.emulation.slowdown)
        self._make_task, self._own_sinks = partial(as_task, task), sinks
        self._device = world.device_kind
        self._run: Run | None = None
        self._loop: Loop | None = None
        self._saving: Saving
        self._open_step: OpenStep | None = None
        self._last_step: Step | None = None
        self._epoch: Epoch | None = None
        self._logged: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._is_done = self._is_closed = self._is_split = self._is_unattended = False
        self._meets = self._script_has_run = False  # since the loop began, or its ranks have met
        self._at_end = ExitStack()
        _open.append(self)
        self._at_end.callback(_open.remove, self)
        register_close(self.close, ends_work=True)
        self._at_end.callback(unregister_close, self.close)

    def __enter__(self) -> Self:
        return self

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
            self._end(error)

    def __iter__(self) -> Iterator[Step]:
        """Train, and yield each step once it is done; after the last one, write the results.

        On a rank on standby, nothing is yielded until it replaces a lost one.

        Raises:
            UserError: the task has no loss, or the training is closed.
        """
        if self._start().setup.task.loss is None:
            raise UserError(
                "iterating over a Training requires Task(loss=...); give it, or iterate over "
                "training.batches()"
            )
        yield from self._steps()

    def run(self) -> None:
        """Train to the end, with nothing of the script's between two steps.

        In layout shard the new values of parameters then come back while the next step computes,
        also in a job that survives lost ranks. Otherwise it is as a loop with an empty body.

        Raises:
            UserError: as iterating does.
        """
        self._is_unattended = True
        for _ in self:
            pass

    def _steps(self, epoch: Epoch | None = None) -> Iterator[Step]:
        while (share := self._next_share(epoch)) is not None:
            step = self._follow(self._guarded(self._current_loop.train, share))
            if step is not None:
                self._enter_script()
                yield step

    def batches(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch, on its device.

        Call `backward` and `step` for each. After a `step` that returned False, the same samples
        are repeated, divided among the surviving ranks.

        Raises:
            UserError: the task has a loss, or the training is closed, or `step` was not called for
                the batch before.
        """
        yield from self._batches(is_split=False)

    def micro_batches(self) -> Iterator[Iterator[Any]]:
        """Yield the micro-batches of this rank's share of each global batch, as an iterator.

        Each has at most `micro_batch_size` samples, and is on the device once it is reached. Call
        `backward` for each micro-batch with the mean over it, and `step` after the last. The
        gradient is that of the global batch, as with `batches`.

        Raises:
            UserError: as for `batches`.
        """
        yield from self._batches(is_split=True)

    def epochs(self) -> Iterator[Epoch]:
        """Yield each epoch, or the rest of one, to be iterated over for what `batches` yields.

        Or, for a task with a loss, for the steps that are done. The script may evaluate and step
        schedulers of its own between two epochs; the run is saved after that. An epoch whose loop
        is left is over, and its other samples are left out.

        Raises:
            UserError: the training is closed, or nothing of an epoch was trained.
        """
        self._start()
        self._end_open_step()
        while (epoch := self._until_done(self._begin_epoch)) is not None:
            self._epoch = epoch
            self._enter_script()
            yield epoch
            self._end_open_step()

    def _batches(self, is_split: bool, epoch: Epoch | None = None) -> Iterator[Any]:
        if self._start().setup.task.loss is not None:
            raise UserError(
                "training.batches() and micro_batches() are for a Task without a loss; iterate "
                "over the Training itself or its epochs, or omit Task(loss=...)"
            )
        self._end_open_step()
        self._is_split = is_split
        if self._loop is not None:
            self._loop.split_shares(is_split)
        while (share := self._next_share(epoch)) is not None:
            batch, step = self._guarded(self._begin_open_step, share), self._open_step
            if step is None:
                continue
            self._enter_script()
            try:
                yield batch
            except GeneratorExit:  # the loop was left; another one may be open by now
                if self._open_step is step:
                    self._open_step = None
                if self._loop is step.loop and not step.is_finished:
                    step.loop.undo()
                raise
            try:
                self._end_open_step()
            finally:
                self._open_step = None

    @property
    def model(self) -> nn.Module:
        """The model, which is trained in place: the same object before and after a loss.

        Collective only if it is the first use of the training.
        """
        return self._prepared.setup.task.model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The task's optimizers. Collective only if it is the first use of the training."""
        return self._prepared.state.optimizers

    @property
    def world(self) -> World:
        """All surviving ranks. Not collective."""
        return self._membership.all_ranks

    @property
    def summary(self) -> Summary:
        """The state of the run, as in summary.json; empty before the first use. Not collective."""
        return Summary() if self._run is None else self._run.summary

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and a loss in the training's precision."""
        return self._prepared.state.computation.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradient of this rank's share, and sum it over the ranks, in the open form.

        Args:
            loss: the mean over the batch, or micro-batch, that was yielded.

        Raises:
            UserError: the loss is not a tensor of one element, or there is no batch for it.
        """
        step = self._current_open_step("backward")
        self._guarded(step.backward, step.check(loss))
        self._enter_script()

    def step(self) -> bool:
        """Apply the gradient: clip it, step optimizers and schedulers, zero it, in the open form.

        Returns:
            False if a rank was lost: nothing was changed, and the samples are repeated.

        Raises:
            UserError: there is no gradient to apply.
        """
        step = self._current_open_step("step")
        step.finish()
        done = None
        if self._loop is step.loop:
            enter_phase("the sum of gradients", waits=True)
            done = self._follow(self._guarded(step.loop.finish))
        self._enter_script()
        return done is not None

    @property
    def has_samples(self) -> bool:
        """Whether the batch that was yielded last is of this rank's own samples. Not collective.

        False if the step has fewer samples than ranks, say, and this rank's share of it is empty:
        the batch then has other samples, so that the model can compute, and leaves no trace in the
        training. A script leaves it out of figures that it keeps itself.

        Raises:
            UserError: there is no batch, outside of a loop over `batches`.
        """
        self._check_open()
        if self._open_step is None:
            raise UserError("read training.has_samples in a loop over training.batches()")
        return self._open_step.has_samples

    @property
    def steps_done(self) -> int:
        """The steps of the run that are done, those of earlier jobs included.

        Collective only if it is the first use of the training.
        """
        return self._prepared.state.progress.step

    @property
    def last_step(self) -> Step | None:
        """The last step that is done; None before the first. Not collective."""
        return self._last_step

    def evaluate(self) -> dict[str, float]:
        """Return the means of the task's metrics over its validation data, by name.

        Each sample counts once, whatever the shares; the same on every rank. Once the run is
        finished, returns the result of its last evaluation.

        Raises:
            UserError: the task has no validation data, or no loss and no metrics.
        """
        task = self._start().setup.task
        if task.validation is None:
            raise UserError("evaluate() requires Task(validation=...)")
        if task.metrics is None and task.loss is None:
            raise UserError("evaluate() requires Task(metrics=...)")
        self._end_open_step()
        if (means := self._until_done(self._evaluate)) is None:
            finished = self.summary.finished
            means = dict((self.summary.validation or {}) if finished else self._evaluated)
        self._enter_script()
        return means

    def log(self, **values: float) -> None:
        """Record the script's own metrics with the next line of metrics.jsonl. Not collective.

        Args:
            values: numbers, or tensors of one element, by name. Rank 0's are written.
        """
        self._check_open()
        try:
            self._logged.update({name: float(value) for name, value in values.items()})
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"training.log({', '.join(values)}) takes numbers or tensors of one element: "
                f"{error}"
            ) from error

    def close(self) -> None:
        """End the training at any point; if it has a run folder, `resume="auto"` continues it.

        Does nothing after the first call.
        """
        if not (self._is_closed or self._run is None):
            self._until_done(self._stop)
        self._end()

    def _start(self) -> Run:
        """Check that the training is open; at its first use, prepare the first step."""
        self._check_open()
        if self._run is not None:
            return self._run
        config, at_end = self._config, self._at_end
        try:
            set_quiet(config.quiet)
            at_end.callback(set_quiet, False)
            self._device.pace.go_to(0)
            self._device.calls.pause()  # the loop has the pace of its steps
            at_end.callback(self._device.calls.resume)
            handle_signals(Path(sys.argv[0]).name or "python")
            if current_watchdog() is None and start_watchdog(setup_limit(config.step_timeout)):
                at_end.callback(stop_watchdog)
            if config.timeline:
                start_recording(Recorder(config.timeline_every))
                at_end.callback(stop_recording)
            self._run = start(self._make_task, config, self._membership)
            self._run.own_sinks = self._own_sinks
            at_end.callback(self._run.close)
        except BaseException:
            self._end()
            raise
        self._is_done = self._run.earlier.is_finished
        return self._run

    @property
    def _prepared(self) -> Run:
        """The run, also of a training that was closed."""
        return self._run or self._start()

    @property
    def _current_loop(self) -> Loop:
        assert self._loop is not None
        return self._loop

    def _next_share(self, epoch: Epoch | None) -> Sequence[MicroBatch] | None:
        """Return this rank's share of the next step; None if the epoch or the run is done."""
        state = self._prepared.state
        while not self._is_done and (epoch is None or epoch.is_current(state.progress)):
            share = self._guarded(self._advance, epoch is None)
            if share is not None:
                return share
        return None

    def _advance(self, crosses_epochs: bool = True) -> Sequence[MicroBatch] | None:
        loop = self._ready_loop()
        if loop is None or self._meet(loop, Call.TRAIN) == Call.STOP:
            return None
        self._saving.save_due(script_has_run=not self._is_unattended)
        is_saved = self._saving.save_to_end()
        if loop.is_outdated and not is_saved:
            loop.close()
            self._loop = None
            return None
        share = None if is_saved else loop.next_share(crosses_epochs)
        if is_saved or loop.progress.is_done:
            self._finish(loop, is_saved)
        return share

    def _finish(self, loop: Loop, is_saved: bool = False) -> None:
        loop.close()
        if not is_saved:
            self._saving.write_results()
            loop.run_finished()
        self._end_standby(is_active=True)

    def _begin_epoch(self) -> Epoch | None:
        """End the epoch before, if there is one; return the next, or None if the run is done."""
        loop = self._ready_loop()
        if loop is None:
            return None
        if self._epoch is not None and self._epoch.is_current(loop.progress):
            if not loop.progress.position:
                raise UserError("iterate over each epoch that training.epochs() yields")
            loop.skip_epoch()
            self._script_has_run = True  # the other ranks do not know of it yet
        if self._meet(loop, Call.BEGIN_EPOCH) == Call.STOP:
            return None
        if loop.progress.epoch_is_over or loop.progress.lacks_results:
            self._end_epoch(loop)
        if loop.progress.is_done:
            self._finish(loop)
            return None
        task = self._prepared.setup.task
        train = self._steps if task.loss is not None else partial(self._batches, False)
        split = partial(self._batches, True)
        return Epoch(loop.progress.epoch, loop.steps_in_epoch, task.data, train, split)

    def _end_epoch(self, loop: Loop) -> None:
        """End an epoch after which the script has done its part."""
        loop.progress.script_is_done = True
        self._saving.save_due()
        loop.end_epoch()

    def _meet(self, loop: Loop, does: Call) -> Call:
        """Return what to do next: what was wanted, or stop with the others. Collective.

        After a loss, a rank that replaces the lost one begins its script, while the others may be
        anywhere in theirs. So until all are at the next step, each evaluates whenever one of them
        does, and all stop if one does. The rank gets the state as the other scripts have left it.
        """
        while self._meets:
            enter_phase("what the other ranks do next", waits=True, limited=False)
            own = does, self._prepared.is_joining, self._script_has_run
            all_do, are_joining, have_run = zip(*gather_values(loop.world.comm, own), strict=True)
            joining = [rank for rank, joins in enumerate(are_joining) if joins]
            if any(have_run) and 0 < len(joining) < len(all_do):
                loop.copy_state(joining)
            self._script_has_run = False
            if not joining or set(all_do) == {Call.TRAIN}:
                self._meets = self._prepared.is_joining = False
            elif Call.EVALUATE in all_do and does != Call.EVALUATE:
                loop.evaluate()
            elif Call.STOP in all_do and does != Call.EVALUATE:
                self._end_loop(loop)
                return Call.STOP
            elif does != Call.TRAIN:
                break
        if not self._meets:
            is_over = loop.progress.has_all_steps and does != Call.EVALUATE
            loop.exchange.announce(Call.FINISH if is_over else does, loop.progress.step)
        return does

    def _ready_loop(self) -> Loop | None:
        """Return the loop of the active ranks; None if the work was done without this rank."""
        if self._loop is None:
            world = self._membership.wait_until_active()
            if world is None:
                self._end_standby(is_active=False)
            else:
                self._loop, self._saving = begin_loop(self._prepared, world, self._logged)
                self._loop.is_unattended = self._is_unattended
                self._meets, self._script_has_run = bool(self._membership.losses), False
                if self._is_split:
                    self._loop.split_shares(True)
        return self._loop

    def _follow(self, step: Step | None) -> Step | None:
        """Do what follows a step that all ranks have done, also if one is lost meanwhile."""
        if step is not None:
            self._last_step = step
            self._guarded(self._current_loop.step_done, step)
            if self._loop is None and self._prepared.state.shards is not None:
                self._until_done(self._ready_loop)  # the script may use the weights
        return step

    def _evaluate(self) -> dict[str, float] | None:
        loop = self._ready_loop()
        if loop is None:
            return None
        self._meet(loop, Call.EVALUATE)
        self._evaluated = loop.evaluate()
        return self._evaluated

    def _stop(self) -> None:
        """Save the run as it stands, for another job; finish it if its last step is done."""
        is_active = self._membership.wait_until_active() is not None
        if is_active and (self._loop is not None or self._membership.losses):
            loop = self._ready_loop()
            assert loop is not None
            self._meet(loop, Call.STOP)
            if not self._is_done:
                self._end_loop(loop)
        else:
            self._end_standby(is_active)

    def _end_loop(self, loop: Loop) -> None:
        loop.undo()
        if loop.progress.epoch_is_over:  # the script has left its loop over the epochs
            self._end_epoch(loop)
        elif loop.progress.has_all_steps:  # the script's loop asked for no more than there are
            loop.next_share()
        if loop.progress.is_done:
            self._finish(loop)
            return
        self._saving.save_and_stop()
        loop.close()
        self._end_standby(is_active=True)

    def _end_standby(self, is_active: bool) -> None:
        """End the job's work, with that of the ranks on standby."""
        membership, run = self._membership, self._prepared
        if is_active:
            membership.commit()
        membership.end_standby()
        run.loader.close()
        if membership.has_standby and not membership.others_failed:
            self._share_results(run)
            membership.commit()
        self._is_done = True
        if run.fault is not None:
            raise run.fault

    def _share_results(self, run: Run) -> None:
        """Give the ranks that were on standby the weights and the summary, for the script."""
        world = self._membership.all_ranks
        fault = run.fault and (str(run.fault), run.fault.exit_code)
        own = run.summary.to_json(), self._evaluated, fault
        summaries, evaluated, faults = zip(*gather_values(world.comm, own), strict=True)
        run.fault = next((AgreedError(*fault) for fault in faults if fault), None)
        if run.fault is None:
            run.state.sync_to_latest(world)
        self._evaluated = next(filter(None, evaluated), {})
        finished = (summary for summary in summaries if summary.get("finished"))
        run.summary = Summary.from_json(next(finished, summaries[world.rank]))

    def _until_done(self, work: Callable[..., Result | None], *arguments: object) -> Result | None:
        """Do something collective until it has a result; None once the work of the job is done."""
        result = None
        while result is None and not self._is_done:
            result = self._guarded(work, *arguments)
        return result

    def _guarded(self, work: Callable[..., Result], *arguments: object) -> Result | None:
        """Do something collective; after a loss, regroup and return None.

        If no rank is lost, the training is closed because of the error.
        """
        try:
            return work(*arguments)
        except Exception as error:
            failure = error
        # Outside the handler, which would keep what the error refers to.
        self._drop_loop()
        if recorder.current is not None:
            recorder.current.enter_phase("recovery", None)
        try:
            self._membership.recover(failure)
        except Exception:
            if isinstance(failure, AgreedError) and self._run is not None:
                # Ranks on standby raise it as well: they would wait forever.
                self._run.fault = self._run.fault or failure
                self._until_done(self._end_standby, False)
            self._end(failure)
            raise
        finally:
            del failure  # its traceback refers to this frame, and to all that the step has made
        return None

    def _end(self, error: BaseException | None = None) -> None:
        """Release all resources. Not collective: no rank is waited for."""
        if self._is_closed:
            return
        self._is_closed = True
        run, world = self._run, self._membership.all_ranks
        if error is not None and world.device_kind.is_out_of_memory(error):
            error.add_note(_OUT_OF_MEMORY.format(world.info))
        self._drop_loop()
        if run is not None and error is not None:
            if not self._is_done:
                self._membership.close()
            if not run.summary.finished:
                lines = str(error).strip().splitlines() or [""]
                text = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
                run.sinks.event("stop", run.state.progress.step, text)
        self._at_end.close()

    def _drop_loop(self) -> None:
        """Close the loop, if there is one, without waiting for a rank."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(together=False)

    def _enter_script(self) -> None:
        """Begin the phase of the script's own code, which may last."""
        done = self._last_step.number if self._last_step is not None else 0
        enter_phase("the script's own code", step=done, limited=False)
        self._script_has_run = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("this Training is closed; make a new one")

    def _current_open_step(self, method: str) -> OpenStep:
        self._check_open()
        if self._open_step is None:
            raise UserError(
                f"call training.{method}() once for each batch, in a loop over training.batches()"
            )
        return self._open_step

    def _begin_open_step(self, share: Sequence[MicroBatch]) -> Any:
        step = OpenStep(self._current_loop, share)
        batch = step.micro_batches() if self._is_split else next(step.micro_batches())
        self._open_step = step
        return batch

    def _end_open_step(self) -> None:
        """Check that a step of the open form is finished, before what comes next."""
        step = self._open_step
        if step is not None and self._loop is step.loop and not step.is_finished:
            raise UserError(
                "call training.backward(loss) and training.step() for each batch before what comes "
                f"next (rank {self.world.info.world_rank}, step {step.loop.progress.step + 1})"
            )


def _is_raised_inside(trace: TracebackType | None) -> bool:
    """Return whether an exception comes from what the training calls, such as the model.

    Then the loop was not left: the other ranks may know nothing of it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(trace)][1:]
    package = __name__.partition(".")[0] + "."
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame in frames)
