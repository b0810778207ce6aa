"""A job's session of a run: the open loop, and recovery after a loss."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.console import set_quiet
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import Recorder, start_recording, stop_recording
from kaitian_mpi.runtime.signals import handle_signals
from kaitian_mpi.runtime.watchdog import (
    current_watchdog,
    first_step_limit,
    set_phase_limit,
    setup_limit,
    start_watchdog,
    watch_end,
)
from kaitian_mpi.train.begin_loop import begin_loop
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.run import Run, start
from kaitian_mpi.train.saving import Saving
from kaitian_mpi.train.setup import MakeTask
from kaitian_mpi.train.state import sync_to_latest
from kaitian_mpi.train.summary import Summary

Result = TypeVar("Result")

_OUT_OF_MEMORY = (
    "{} is out of memory. Set a smaller micro_batch_size, or leave it to the benchmark (balance "
    "adaptive, micro_batch_size 0); or use a smaller global batch, precision bf16, layout auto "
    "(docs/large-models.md), or other devices"
)


class Session:
    """Holds a run and the loop that trains it, and repeats collective work after a loss.

    Attributes:
        membership: the surviving and the active ranks.
        run: this rank's view of the run; None before `start`.
        loop: trains on the active ranks; None before the first step, and from a loss until
            `begin_loop`.
        saving: saves the loop's state; exists as soon as there is a loop.
        evaluated: the means of the last evaluation.
        logged: the script's own metrics, for the next line of metrics.jsonl.
        is_done: whether the training is finished on all ranks.
        is_closed: whether resources are released.
        at_end: callbacks that release them.
    """

    saving: Saving

    def __init__(
        self,
        make_task: MakeTask,
        config: TrainingConfig,
        membership: Membership,
        sinks: Sequence[MetricsSink],
    ) -> None:
        self.membership = membership
        self.run: Run | None = None
        self.loop: Loop | None = None
        self.evaluated: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.is_done = False
        self.is_closed = False
        self.at_end = ExitStack()
        self._make_task = make_task
        self._config = config
        self._sinks = sinks

    def start(self) -> Run:
        """Check that the session is open; at its first use, prepare the first step. Collective."""
        self.check_open()
        if self.run is None:
            try:
                self._prepare_process()
                self.run = start(self._make_task, self._config, self.membership)
            except BaseException as error:
                self._word(error)
                self.end()
                raise
            self.run.script_sinks = self._sinks
            self.at_end.callback(self.run.close)
            self.is_done = self.run.earlier.is_finished
        return self.run

    def _prepare_process(self) -> None:
        """Start signal handling, the watchdog and the timeline, until the session's end."""
        config = self._config
        device = self.membership.all_ranks.device_kind
        set_quiet(config.quiet)
        self.at_end.callback(set_quiet, False)
        device.pace.go_to(0)
        device.calls.pause()  # the loop has the pace of its steps
        self.at_end.callback(device.calls.resume)
        handle_signals(Path(sys.argv[0]).name or "python")
        limit_sec = setup_limit(config.step_timeout)
        if current_watchdog() is None:
            start_watchdog(limit_sec, first_step_limit(config.step_timeout))
        set_phase_limit(limit_sec)
        self.at_end.callback(watch_end)
        if config.timeline:
            start_recording(Recorder(config.timeline_every))
            self.at_end.callback(stop_recording)

    @property
    def prepared(self) -> Run:
        """The run, also of a session that was closed. Collective if it is the first use."""
        return self.run or self.start()

    @property
    def current_loop(self) -> Loop:
        assert self.loop is not None
        return self.loop

    def begin_loop(self) -> bool:
        """Begin a loop on the active ranks; return whether this rank is one. Collective.

        A rank on standby waits until it is active. If the work is done without it, it learns the
        results.
        """
        world = self.membership.wait_until_active()
        if world is None:
            self.end_standby(is_active=False)
            return False
        self.loop, self.saving = begin_loop(self.prepared, world, self.logged)
        return True

    def end_loop(self) -> None:
        """Close the loop, so that the next step begins another. Collective over active ranks."""
        self.current_loop.close()
        self.loop = None

    def evaluate(self) -> dict[str, float]:
        """Return the loop's means over the validation data. Collective over active ranks."""
        self.evaluated = self.current_loop.evaluate()
        return self.evaluated

    def drop_loop(self) -> None:
        """Close the loop, if there is one, without waiting for a rank. Not collective."""
        loop = self.loop
        self.loop = None
        if loop is not None:
            loop.close(together=False)

    def until_done(self, work: Callable[..., Result | None], *arguments: object) -> Result | None:
        """Repeat collective work until it has a result; return None once the job is done."""
        result = None
        while result is None and not self.is_done:
            result = self.guarded(work, *arguments)
        return result

    def guarded(self, work: Callable[..., Result], *arguments: object) -> Result | None:
        """Do collective work; after a loss, regroup and return None.

        If no rank is lost, the session ends because of the error.
        """
        try:
            return work(*arguments)
        except Exception as error:
            failure = error
        # Outside the handler, which would keep what the error refers to.
        self.drop_loop()
        if recorder.current is not None:
            recorder.current.enter_phase("recovery", None)
        try:
            self.membership.recover(failure)
        except Exception:
            if isinstance(failure, AgreedError) and self.run is not None:
                # Ranks on standby raise it as well: they would wait forever.
                self.run.fault = self.run.fault or failure
                self.until_done(self.end_standby, False)
            self._word(failure)
            self.end(failure)
            raise
        finally:
            del failure  # its traceback refers to this frame, and to all objects of the step
        gc.collect()  # the step's objects refer to each other, by the errors of its messages
        return None

    def _word(self, error: BaseException) -> None:
        """Let the message of a user's mistake name settings as this user gives them."""
        if isinstance(error, UserError):
            error.args = (self._config.word(str(error)),)

    def end_standby(self, is_active: bool) -> None:
        """End the job's work, with that of the ranks on standby. Collective over all ranks."""
        membership = self.membership
        run = self.prepared
        if is_active:
            membership.commit()
        membership.end_standby()
        run.loader.close()
        if membership.has_standby and not membership.others_failed:
            self._share_results(run)
            membership.commit()
        self.is_done = True
        if run.fault is not None:
            raise run.fault

    def _share_results(self, run: Run) -> None:
        """Give the ranks that were on standby the weights and the summary, for the script."""
        world = self.membership.all_ranks
        fault = run.fault and (str(run.fault), run.fault.exit_code)
        results = gather_values(world.comm, (run.summary.to_json(), self.evaluated, fault))
        summaries, evaluated, faults = zip(*results, strict=True)
        run.fault = next((AgreedError(*fault) for fault in faults if fault), None)
        if run.fault is None:
            sync_to_latest(run.state, world)
        self.evaluated = next(filter(None, evaluated), {})
        finished = (summary for summary in summaries if summary.get("finished"))
        run.summary = Summary.from_json(next(finished, summaries[world.rank]))

    def end(self, error: BaseException | None = None) -> None:
        """Release all resources. Not collective: no rank is waited for."""
        if self.is_closed:
            return
        self.is_closed = True
        world = self.membership.all_ranks
        if error is not None and world.device_kind.is_out_of_memory(error):
            error.add_note(_OUT_OF_MEMORY.format(world.info))
        self.drop_loop()
        if self.run is not None and error is not None:
            self._report_error(self.run, error)
        self.at_end.close()

    def _report_error(self, run: Run, error: BaseException) -> None:
        if not self.is_done:
            self.membership.close()
        if not run.summary.finished:
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
            run.sinks.event("stop", run.state.progress.step, text)

    def check_open(self) -> None:
        """Check that the session is not closed. Not collective."""
        if self.is_closed:
            raise UserError("this Training is closed; make a new one")
