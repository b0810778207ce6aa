"""A run that goes on with the surviving ranks, attempt after attempt, until it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import set_quiet
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import Recorder, start_recording, stop_recording
from kaitian_mpi.observe.timeline.sampling import Sampling
from kaitian_mpi.runtime.signals import handle_signals, is_handled
from kaitian_mpi.runtime.watchdog import (
    current_watchdog,
    setup_limit,
    start_watchdog,
    stop_watchdog,
)
from kaitian_mpi.train import events
from kaitian_mpi.train.attempt import Attempt
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.session import open_run
from kaitian_mpi.train.summary import Summary
from kaitian_mpi.train.task import Task

Result = TypeVar("Result")


class ElasticRun:
    """Trains a run on whichever ranks are left, until it is done or stopped.

    After a loss the attempt at hand is given up, the surviving ranks regroup, and the next attempt
    goes on from the last step that is done. Every method is collective, unless stated otherwise.

    Attributes:
        task: what is trained.
        membership: the ranks.
        attempt: at training on the active ranks; None before it begins, and after a loss.
        is_done: whether the run is finished, or stopped for good.
        is_closed: whether everything is let go of.
    """

    def __init__(
        self,
        make_task: Callable[[], Task],
        config: TrainingConfig,
        world: World,
        on_close: Callable[[], None],
        own_sinks: Sequence[MetricsSink] = (),
    ) -> None:
        """Load the task, and begin or resume its run.

        Args:
            make_task: returns the task.
            config: the settings.
            world: all ranks.
            on_close: called once, when everything is let go of.
            own_sinks: the script's own sinks of metrics.

        Raises:
            UserError: the task or a setting cannot be used.
        """
        slowdown = config.emulate_slowdown or world.emulation.slowdown
        config = replace(config, emulate_slowdown=slowdown)
        set_quiet(config.quiet)
        self.is_closed = False
        self.attempt: Attempt | None = None
        self._on_close = on_close
        self._unrecorded: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._script_slowdown = world.script_slowdown
        self._script_slowdown.pause()  # the trainer slows down each of its steps itself
        self._owns_watchdog = _watch_process(config)
        self._run: Run | None = None
        self.membership = Membership(world)
        if config.timeline:
            start_recording(Recorder(Sampling(config.timeline_every)))
        try:
            opened = open_run(make_task, config, self.membership, own_sinks)
            self.task, self._run, self._summary = opened
        except BaseException:
            self.leave()
            raise
        self.is_done = self._run is None

    @property
    def summary(self) -> Summary:
        """How the run stands. Not collective."""
        return self._summary if self._run is None else self._run.summary

    @property
    def computation(self) -> Computation:
        """How this rank computes. Not collective."""
        return self._unfinished.state.computation

    @property
    def _unfinished(self) -> Run:
        assert self._run is not None, "a finished run trains no batch"
        return self._run

    def guarded(self, work: Callable[..., Result], *arguments: object) -> Result | None:
        """Do something collective; after a loss, regroup and return None."""
        try:
            return work(*arguments)
        except Exception as error:
            failure = error
        self.recover(failure)  # outside the handler, which would keep what the error refers to
        return None

    def recover(self, failure: Exception) -> None:
        """Give up the attempt, and regroup with the surviving ranks.

        Raises:
            Exception: the failure, if no rank is lost; then everything is let go of.
        """
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close(failure)
        if recorder.current is not None:
            recorder.current.enter_phase("recovery", None)
        try:
            self.membership.recover(failure)
        except Exception:
            self.fail(failure)
            raise

    def next_share(self) -> Sequence[MicroBatch] | None:
        """Return this rank's share of the next step; None where the run is done.

        Raises:
            AgreedError: it is done, but its results could not be written.
        """
        while not self.is_done:
            share = self.guarded(self._advance)
            if share is not None:
                return share
        return None

    def evaluate(self) -> dict[str, float]:
        """Return the means of the task's metrics; of a run that is done, those found last."""
        while not self.is_done:
            means = self.guarded(self._evaluate)
            if means is not None:
                return means
        finished = self.summary.finished
        return dict((self.summary.validation or {}) if finished else self._evaluated)

    def record(self, figures: Mapping[str, float]) -> None:
        """Add figures to the next line of metrics. Not collective."""
        if self.attempt is None:
            self._unrecorded.update(figures)
        else:
            self.attempt.record(figures)

    def stop(self) -> None:
        """Let the ranks on standby leave, once the run is saved as it stands, for another job.

        A run whose last step is done is finished instead. Does nothing to one that is done.
        """
        while not (self.is_closed or self.is_done):
            self.guarded(self._stop)

    def fail(self, error: Exception) -> None:
        """End the run by an error; collective only if it is an `AgreedError`.

        The ranks on standby raise that as well: they would wait forever.
        """
        if isinstance(error, AgreedError) and self._run is not None:
            self._run.fault = self._run.fault or error
            while not self.is_done:
                self.guarded(self._release, False)
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Let go of everything. Not collective: no rank is waited for.

        Args:
            error: why, if it is one.
        """
        if self.is_closed:
            return
        self.is_closed = True
        world = self.membership.all_ranks
        if error is not None and world.device_kind.is_out_of_memory(error):
            error.add_note(
                f"{world.info} is out of memory. Set a smaller micro_batch_size, or leave it to "
                "the benchmark (balance adaptive, micro_batch_size 0); or a smaller global batch, "
                "precision bf16, or other devices; see 'A device that is too small' in "
                "docs/balance.md"
            )
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close(error or UserError("the training is closed"))
        if self._run is not None:
            if error is not None and not self.is_done:
                self.membership.abandon()
            if error is not None and not self._run.summary.finished:
                events.report_failure(self._run, error)
            self._run.sinks.close(finished=self._run.summary.finished)
            self._run.loader.close()
            self._run.setup.folder.close()
        stop_recording()
        if self._owns_watchdog:
            stop_watchdog()
        set_quiet(False)
        self._script_slowdown.resume()
        self._on_close()

    def _advance(self) -> Sequence[MicroBatch] | None:
        attempt = self._ready()
        if attempt is not None and attempt.is_to_restart and attempt.save_for_restart():
            attempt.close()
            self._release(is_active=True)
            return None
        share = None if attempt is None else attempt.next_share()
        if share is None:
            self._finish(attempt)
        return share

    def _evaluate(self) -> dict[str, float] | None:
        attempt = self._ready()
        if attempt is None:
            self._finish(None)
            return None
        self._evaluated = dict(attempt.trainer.evaluate().means)
        return self._evaluated

    def _ready(self) -> Attempt | None:
        """Return what trains on the active ranks; None once the work is done without this rank."""
        if self.attempt is None:
            world = self.membership.wait_until_active()
            if world is not None:
                self.attempt = Attempt(self._unfinished, world)
                self.attempt.record(self._unrecorded)
                self._unrecorded = {}
        return self.attempt

    def _finish(self, attempt: Attempt | None) -> None:
        """Write the results, and let the ranks on standby leave."""
        if attempt is not None:
            attempt.finish()
        self._release(is_active=attempt is not None)

    def _release(self, is_active: bool) -> None:
        """End the job's work, with that of the ranks on standby.

        Raises:
            AgreedError: what the active ranks have ended by; raised on all ranks.
        """
        if is_active:
            self.membership.commit()
        self.membership.release()
        run = self._unfinished
        run.loader.close()
        if self.membership.has_standby and not self.membership.is_abandoned:
            self._share_results(run)
            self.membership.commit()
        self.is_done = True
        if run.fault is not None:
            raise run.fault

    def _share_results(self, run: Run) -> None:
        """Give the ranks that stood by the weights and the summary, for the script may use both."""
        world = self.membership.all_ranks
        fault = run.fault and (str(run.fault), run.fault.exit_code)
        own = run.summary.to_json(), self._evaluated, fault
        summaries, evaluated, faults = zip(*gather_values(world.comm, own), strict=True)
        run.fault = next((AgreedError(*fault) for fault in faults if fault), None)
        if run.fault is None:
            run.state.sync_to_latest(world)
        self._evaluated = next(filter(None, evaluated), {})
        finished = (summary for summary in summaries if summary.get("finished"))
        run.summary = Summary.from_json(next(finished, summaries[world.rank]))

    def _stop(self) -> None:
        is_active = self.membership.wait_until_active() is not None
        if is_active and (self.attempt is not None or self.membership.losses):
            attempt = self._ready()
            assert attempt is not None
            if attempt.has_done_all_steps:  # the loop asked for no more than there are
                self._advance()
                return
            attempt.save()
            attempt.close()
        self._release(is_active)


def _watch_process(config: TrainingConfig) -> bool:
    """Have this rank watched, and its signals handled, unless its program does so already.

    Returns:
        Whether a watchdog has been started.
    """
    if not is_handled():
        handle_signals(Path(sys.argv[0]).name or "python")
    if current_watchdog() is not None:
        return False
    return start_watchdog(setup_limit(config.step_timeout)) is not None
