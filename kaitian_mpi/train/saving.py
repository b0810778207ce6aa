"""Saves a run: when it is due, at a signal's or a supervisor's request, and at its end.

A checkpoint is on disk; a snapshot, in each host's memory, is resumed from without a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.observe.folders import RestartRequest
from kaitian_mpi.observe.progress import resume_line
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.exit_save import ExitSave
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports

_MAX_SHARE_OF_SNAPSHOTS = 0.05


class Saving(StepObserver):
    """Saves the run while these ranks train it. Every method is collective."""

    def __init__(self, run: Run, world: World, sampler: LoadAdaptiveSampler) -> None:
        """Handle signals from now on: until all ranks end the loop, or the next one begins."""
        self.exit_save = ExitSave(run, world, self._metadata)
        self._run = run
        self._world = world
        self._sampler = sampler
        self._checkpoints = run.checkpoints
        self._snapshots = Snapshots(run, world, self._metadata)
        self._restart = RestartRequest(run.setup.path if run.owns_files else None)
        self._is_to_end = False
        self._is_due = self._is_missing()
        self._has_step = self._is_due
        self._has_reported = False
        run.signals.close()  # of the loop that a loss has ended
        run.signals.enter_context(self.exit_save.at_signals())
        if run.is_joining:
            run.request.clear()  # made before this rank trained: the others have answered it

    def wants_checkpoint(self) -> bool:
        """Return whether a checkpoint is due by time, or requested by a signal or a supervisor.

        Not collective. True once per checkpoint, except if the job is to end after it.
        """
        if not self._checkpoints.writers:
            self._refuse_request()
            return False
        due_sec = 60 * self._run.config.checkpoint_minutes
        is_due = (
            self._run.request.is_made
            or 0 < due_sec <= time.monotonic() - self._checkpoints.saved_at
        )
        if is_due and not self._has_reported and self._checkpoints.on_disk is not None:
            self._has_reported = True
            return True
        return self._is_asked_to_end()

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if not self._checkpoints.writers:
            return
        requested = reports is not None and bool(reports.wants_checkpoint.any())
        # After the last step, only the results are missing.
        may_end = requested and not self._progress.has_all_steps
        is_asked = self._is_asked_to_end
        self._is_to_end = may_end and any(gather_values(self._world.comm, is_asked()))
        every = self._run.config.checkpoint_every
        self._is_due = requested or (every > 0 and step.number % every == 0)
        self._has_step = not self._is_to_end
        self._report_written()

    def evaluated(self, means: Mapping[str, float], epoch: int) -> None:
        # A higher score is better.
        self._save(means.get("accuracy", -means["loss"] if "loss" in means else None))

    def close(self, together: bool) -> None:
        if together:  # else a signal during the recovery saves the last step's state
            self._run.signals.close()

    def save_and_stop(self) -> None:
        """Save a checkpoint between two steps, with which another job continues."""
        if not self.exit_save.mark.matches():
            warn_rank_0(
                self._world,
                f"the weights were changed after step {self._progress.step}, and are saved as they "
                "are; if an average is swapped in, end the training first",
            )
        self._save()
        self._checkpoints.wait()
        self._report_written()
        progress = self._progress
        path = self._run.setup.path
        self._event("stop", f"training was closed after step {progress.step}")
        self._run.write_summary(
            steps=progress.step, epochs=progress.epoch, bad_steps=progress.bad_steps
        )
        if path is not None:
            settings = self._run.config.spell(run_dir=str(path), resume="auto")
            warn_rank_0(self._world, resume_line(progress.step, progress.total_steps, settings))

    def save_due(self, script_has_run: bool = True) -> None:
        """Save if that is due since the last step, now that the script's code after it has run.

        So an average of the weights, for example, is part of the checkpoint.
        """
        if script_has_run:
            self.exit_save.mark.take()
        if self._has_step:
            self._has_step = False
            if self._is_due:
                self._save()
            self._snapshots.save_if_due()

    def save_to_end(self) -> bool:
        """Save the state between two steps, on disk and in every host's memory, if asked to end."""
        if not self._is_to_end:
            return False
        self._is_to_end = False
        step = self._progress.step
        self._save()
        self._snapshots.save_if_due(always=True)
        self._checkpoints.wait()
        is_saved = any(writer.last_written == step for writer in self._checkpoints.writers)
        if any(gather_values(self._world.comm, is_saved)):
            self._restart.fulfill()
            text = f"step {step} is saved, and the job ends: {self._to_resume} resumes from it"
            print_rank_0(self._world, text)
            self._report_written()
            self._event("stop", text)
            return True
        self._restart.refuse()
        self._run.request.ends_job = False
        text = f"step {step} could not be saved, so the job does not end"
        warn_rank_0(self._world, text)
        return False

    def write_results(self) -> None:
        """Bring the results to disk, after `close`; without them the run is not finished."""
        from kaitian_mpi.train.results import Results

        results = Results(self._run, self._world, self._metadata)
        enter_phase("writing the last checkpoint", limited=False)
        with self.exit_save.at_signals():
            if results.write():
                self._report_written()
                results.report()

    def _save(self, score: float | None = None) -> None:
        """Save a checkpoint, if there is a run folder; restart `--checkpoint-minutes`."""
        self._has_reported = False
        if self._checkpoints.on_disk is not None:
            enter_phase("saving a checkpoint", waits=True, limited=False)
            with self._run.saving(self._world) as on_piece:
                self._checkpoints.save(
                    self._world, self._run.state, self._metadata(), score, on_piece
                )
            self._run.request.is_made = False  # only now: a rank may be lost meanwhile

    @property
    def _to_resume(self) -> str:
        return self._run.config.spell(resume="auto")

    @property
    def _progress(self) -> Progress:
        return self._run.state.progress

    def _metadata(self) -> RunMetadata:
        return self._run.metadata(self._world, self._sampler.batch_sizes)

    def _is_missing(self) -> bool:
        """Return whether there is no checkpoint yet that a loss needs, or was due at one."""
        writer = self._checkpoints.on_disk
        progress = self._progress
        run = self._run
        every = run.config.checkpoint_every
        step = progress.step
        is_due = progress.position == 0 or (every > 0 and step % every == 0)
        # At the start it is due if a rank has state that no other has, and may be lost.
        may_lose = self._world.size > 1 and not run.state.partition.has_copies
        is_due &= bool(run.membership.losses) if step else run.membership.survives and may_lose
        if not is_due or not self._checkpoints.writers:
            return False
        saved_steps = (
            (writer.last_submitted, writer.files.newest_step()) if writer is not None else ()
        )
        return step not in gather_values(self._world.comm, saved_steps)[0]

    def _event(self, kind: str, text: str) -> None:
        self._run.sinks.event(kind, self._progress.step, text)

    def _report_written(self) -> None:
        """Report the checkpoint written in the background since the last call, if any."""
        writer = self._checkpoints.on_disk
        if writer is not None and (step := writer.newly_written()) is not None:
            self._run.sinks.event("checkpoint", step, f"the checkpoint of step {step} is written")

    def _refuse_request(self) -> None:
        """Warn that nothing can be saved, if a signal has asked for it."""
        if self._run.request.is_made:
            self._run.request.clear()
            warn_rank_0(
                self._world,
                "a signal asks for a checkpoint, but there is no folder for it; training "
                "continues: set a run folder (run_dir) next time",
            )

    def _is_asked_to_end(self) -> bool:
        return self._run.request.ends_job or self._restart.is_made()


class Snapshots:
    """Saves a snapshot in each host's memory when it is due; does nothing if none is wanted."""

    def __init__(self, run: Run, world: World, make_metadata: Callable[[], RunMetadata]) -> None:
        self._run = run
        self._world = world
        self._make_metadata = make_metadata
        self._saved_at = 0.0
        self._waited_sec = 0.0

    def save_if_due(self, always: bool = False) -> None:
        """Save a snapshot, if it is due. Collective if the state is large.

        Also due after the first step, so that a restarted job needs no benchmark. If training
        waits for it, it is left out if it would take more than 5% of the time.
        """
        run = self._run
        writer = run.checkpoints.in_memory
        step = run.state.progress.step
        is_wanted = always or step == 1
        if writer is None or not (is_wanted or step % run.config.snapshot_every == 0):
            return
        begin = time.monotonic()
        between_sec = begin - self._saved_at + self._waited_sec
        is_wanted = is_wanted or self._waited_sec <= _MAX_SHARE_OF_SNAPSHOTS * between_sec
        hosts = [info.host for info in self._world.infos]
        is_first_of_host = hosts.index(self._world.info.host) == self._world.rank
        if is_first_of_host and is_wanted:
            has_waited = run.checkpoints.write(
                writer, run.state, run.state.shared(), self._make_metadata()
            )
            self._saved_at = time.monotonic()
            self._waited_sec = (self._saved_at - begin) * has_waited
        run.checkpoints.wait_if_large(self._world, run.state)
