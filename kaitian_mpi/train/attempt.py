"""Trains a run on one set of ranks until it is done or a rank is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.errors import AgreedError, StorageError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import lost_line, print_rank_0, result_line, warn_rank_0
from kaitian_mpi.observe.outcome import resume_line
from kaitian_mpi.observe.reading import Evaluated
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.runtime import startup_clock
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.signals import on_checkpoint_request, on_exit_signal
from kaitian_mpi.runtime.watchdog import current_watchdog, enter_phase, setup_limit
from kaitian_mpi.train import events
from kaitian_mpi.train.checkpoint.exit_save import ExitSave
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.divergence import repair_divergence
from kaitian_mpi.train.evaluation import Evaluation
from kaitian_mpi.train.follow_up import StepFollowUp
from kaitian_mpi.train.measure.plan import FROM_BENCHMARK, Plan, record_plan
from kaitian_mpi.train.presence import Presence
from kaitian_mpi.train.profiling import ProfiledSteps
from kaitian_mpi.train.restart_request import RestartRequest
from kaitian_mpi.train.results import write_results
from kaitian_mpi.train.resumption import begin_branch
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.step import Step
from kaitian_mpi.train.timeline import Timeline


class Attempt:
    """Trains a run on one set of ranks until it is done or one of them is lost.

    Every method is collective over these ranks, unless stated otherwise.
    """

    def __init__(self, run: Run, world: World) -> None:
        """Begin from wherever the run is.

        Args:
            run: that is trained, and learns of it.
            world: these ranks.
        """
        run.take_over_files(world)
        run.choose_allreduce_again(world)
        plan = run.plan(world)
        run.restore_state(world, plan)
        run.checkpoints.restart_timer()
        self._run, self._world, self._state = run, world, run.state
        self._checkpoints = run.checkpoints
        self.trainer = run.make_trainer(world, plan)
        self._timeline = Timeline(world, run.setup.path, self._state.progress.step)
        self._profile = ProfiledSteps(run.config.profile, world, run.setup.path)
        self._contexts = ExitStack()
        follow_up = StepFollowUp(run.config, world, run.setup.folder, self.trainer, plan, run.sinks)
        self._follow_up = self._contexts.enter_context(follow_up)
        try:
            self._log_start(plan)
            run.earlier = begin_branch(
                run.config, run.earlier, world, run.checkpoints, run.state, self.metadata()
            )
        except Exception as error:
            self.close(error)
            raise
        self._contexts.callback(self._remember_costs)
        watchdog = current_watchdog()
        if watchdog is not None and world.size > 1:
            presence = Presence(world.comm, watchdog, setup_limit(run.config.step_timeout))
            self._contexts.callback(presence.close)
        self._contexts.enter_context(self._saved_at_signals())
        self._is_in_epoch = False
        owns_files = not isinstance(run.setup.folder, NoFolder)
        self._restart = RestartRequest(run.setup.path if owns_files else None)
        self.is_to_restart = False
        """Whether the job is asked to save and end here; the same on every rank."""

    @property
    def has_done_all_steps(self) -> bool:
        """Whether only the results are missing; the same on every rank. Not collective."""
        return self._state.progress.step >= self._state.progress.total_steps

    def next_share(self) -> list[MicroBatch] | None:
        """Return this rank's share of the next step; epochs that end on the way are evaluated.

        Returns:
            None where the run is done.
        """
        while not self._state.progress.is_done:
            if not self._is_in_epoch:
                self._follow_up.metrics.restart()
                self._is_in_epoch = True
            self._profile.begin(self._state.progress.step + 1)
            parts = self.trainer.fetch()
            if parts is not None:
                return parts
            self._is_in_epoch = False
            enter_phase("the end of the epoch", waits=True)
            self._follow_up.epoch_done()
            self._end_epoch(self.trainer.evaluate())
        return None

    def step_done(self, step: Step) -> Step:
        """Do what follows a step that the trainer has done, and return it."""
        wants_checkpoint = self._checkpoints.wants_checkpoint() or self._restart.is_made()
        requested = self._follow_up.step_done(step, wants_checkpoint)
        self._log_startup()
        self._log_recovery(step.number)
        self._check_weights(step.number)
        self._profile.step_done(step.number)
        self._timeline.step_done(step.number)
        self.is_to_restart = requested and self._is_restart_due()
        if not self.is_to_restart:
            self._save_if_due(step.number, requested)
        events.report_checkpoints(self._run)
        return step

    def record(self, values: Mapping[str, float]) -> None:
        """Add figures to the next line of metrics. Not collective."""
        self._follow_up.metrics.record(values)

    def save(self) -> None:
        """Save a checkpoint between two steps."""
        enter_phase("saving a checkpoint", waits=True, limited=False)
        self.trainer.abandon()
        self._checkpoints.save(self._world, self._state, self.metadata())
        self._checkpoints.wait()
        events.report_checkpoints(self._run)
        step = self._state.progress.step
        events.report_stop(self._run, f"the training is closed after step {step}")
        if self._run.setup.path is not None:
            total, folder = self._state.progress.total_steps, self._run.setup.path
            warn_rank_0(self._world, resume_line(step, total, str(folder)))

    def save_for_restart(self) -> bool:
        """Save the state between two steps, on disk and in every host's memory.

        Returns:
            Whether it is in either; the same on every rank. If not, training goes on.
        """
        enter_phase("saving a checkpoint", waits=True, limited=False)
        self.is_to_restart = False
        step = self._state.progress.step
        if self._checkpoints.save_for_restart(self._world, self._state, self.metadata()):
            self._restart.fulfil()
            text = f"step {step} is saved; ending, to be started again"
            print_rank_0(self._world, text)
            events.report_checkpoints(self._run)
            events.report_stop(self._run, text)
            return True
        self._restart.refuse()
        warn_rank_0(self._world, f"step {step} could not be saved: the job goes on as it is")
        return False

    def close(self, error: BaseException | None = None) -> None:
        """Stop training on these ranks.

        Args:
            error: why; then no rank is waited for.
        """
        self.trainer.close()
        self._follow_up.metrics.flush(self._state.progress)
        if error is None:
            self._profile.collect(self._state.progress.step)
            self._timeline.share(self._state.progress.step)
            self._contexts.close()
        else:
            self._profile.abandon()
            self._contexts.__exit__(type(error), error, error.__traceback__)

    def finish(self) -> None:
        """End the training, and bring the results to disk; without them it is not finished."""
        self.close()
        enter_phase("writing the last checkpoint", limited=False)
        with self._saved_at_signals():
            self._write_results()
        self._profile.report_missing(self._state.progress.step)
        self._timeline.finish(self._state.progress.step)

    def _write_results(self) -> None:
        run, fault = self._run, ""
        if self._world.rank == 0:
            summary = replace(run.summary, failures=run.failures())
            try:
                write_results(
                    *(run.setup.folder, self._checkpoints, self._state, self.metadata, summary),
                    export=run.config.export,
                )
            except StorageError as error:
                fault = str(error)
        sleeping_barrier(self._world.comm)
        fault = gather_values(self._world.comm, fault)[0]
        if fault:
            run.fault = AgreedError(fault, StorageError.exit_code)
        else:
            self._checkpoints.close()
            run.summary = replace(run.summary, finished=True)
            events.report_checkpoints(run)
            events.report_finish(run)
            if run.setup.path is not None:
                print_rank_0(self._world, f"results in {run.setup.path}")
            if run.config.export:
                print_rank_0(self._world, f"exported the weights to {run.config.export}")

    def metadata(self) -> RunMetadata:
        """Return the metadata to save with the state. Not collective."""
        return self._run.metadata(self._world, self.trainer.sampler.batch_sizes)

    @contextmanager
    def _saved_at_signals(self) -> Iterator[None]:
        """Save the state when a signal ends the job or requests it in the block. Not collective."""
        state, checkpoints = self._state, self._checkpoints
        prepare = partial(checkpoints.prepare_exit, state)
        exit_save = ExitSave(
            state.lock,
            self._save_at_exit,
            None if device_of(state.computation.device).is_host else prepare,
            after_fork=partial(torch.set_num_threads, 1),  # its compute threads are not forked
        )
        owns_files = not isinstance(self._run.setup.folder, NoFolder)
        callbacks = (exit_save.run, exit_save.interrupt) if owns_files else (lambda: "",)
        with (
            on_exit_signal(*callbacks, reports=self._world.rank == 0),
            on_checkpoint_request(checkpoints.request),
        ):
            yield

    def _save_at_exit(self) -> str:
        """Save the state, in a forked process that outlives this one; return what was saved."""
        text = self._checkpoints.save_at_exit(self._state, self.metadata())
        events.report_signal(self._run, text)
        return text

    def _log_start(self, plan: Plan) -> None:
        """Log and record the plan and the ranks that train."""
        run, world, step = self._run, self._world, self._state.progress.step
        losses = run.membership.begin_step(step + 1)
        if not (run.has_started or run.earlier.was_on_standby):
            events.report_start(run, world)
        run.has_started = True
        if losses:
            reason = lost_line([info for loss in losses for info in loss.lost])
            left = "1 rank continues" if world.size == 1 else f"{world.size} ranks continue"
            warn_rank_0(world, f"{reason} at step {step}; {left}")
            events.report_losses(run, world, losses)
        elif step:
            reason = "as resumed"
        elif run.profiles.measured:
            reason = FROM_BENCHMARK
            run.profiles.show(world, run.setup, plan)
        else:
            reason = "equal shares"
        record_plan(world, run.setup, plan, step, reason, run.sinks)
        run.summary = run.summary.with_ranks(world, self._state, plan, run.allreduce_algorithm)
        run.write_summary()

    def _log_startup(self) -> None:
        """Log, once, where the seconds until the first step went."""
        seconds = startup_clock.finish()
        if seconds is not None:
            print_rank_0(self._world, startup_clock.describe(seconds))
            self._run.summary = replace(self._run.summary, startup_sec=seconds)

    def _remember_costs(self) -> None:
        self._run.record_costs(self._world, self._follow_up.balancing.costs())

    def _log_recovery(self, step: int) -> None:
        """Log, once per loss, how long the recovery took."""
        recovered = self._run.membership.newly_recovered()
        for loss in recovered:
            text = f"step {step} is done, {loss.recovery_sec:.2f} s after the loss was noticed"
            print_rank_0(self._world, text)
            events.report_recovery(self._run, step, loss, text)
        if recovered:
            self._run.write_summary()

    def _check_weights(self, step: int) -> None:
        """Repair weights that differ between ranks, every `--check-every` steps."""
        every = self._run.config.check_every
        if every and step % every == 0:
            repair_divergence(self._world, self._state, self._run.sinks)

    def _is_restart_due(self) -> bool:
        """Return whether to save and end now; after the last step, only the results are missing."""
        asked = any(gather_values(self._world.comm, self._restart.is_made()))
        return asked and not self.has_done_all_steps

    def _save_if_due(self, step: int, requested: bool) -> None:
        """Save a checkpoint and a snapshot, if they are due."""
        if self._checkpoints.is_due(step, requested):
            enter_phase("saving a checkpoint", waits=True, limited=False)
            self._checkpoints.save(self._world, self._state, self.metadata())
        self._checkpoints.snapshot(self._world, self._state, self.metadata)

    def _end_epoch(self, result: Evaluation) -> None:
        run, progress, epoch = self._run, self._state.progress, self._state.progress.epoch
        if progress.position >= len(run.setup.train):
            progress.epoch_done(run.config.epochs)
        else:
            progress.stopped()
        where = (progress.epoch, progress.position, progress.step)
        print_rank_0(self._world, result_line(*where, result.means))
        if result.means:
            now, step = time.time(), progress.step
            run.sinks.evaluated(Evaluated(step=step, epoch=epoch, time=now, values=result.means))
        run.setup.folder.save_model(self._state.weights())
        run.summary = run.summary.with_epoch(self.trainer, self._follow_up, result)
        run.write_summary()
        self._checkpoints.save(self._world, self._state, self.metadata(), result.quality)
