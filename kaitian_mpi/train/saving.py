"""Saves a run: when it is due, at signals, at a supervisor's request, and at its end."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.errors import AgreedError, StorageError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.observe.folders import RestartRequest, snapshots_name
from kaitian_mpi.observe.progress import resume_line
from kaitian_mpi.observe.reading import Event
from kaitian_mpi.observe.run_folder import RunFolderSink
from kaitian_mpi.runtime.signals import on_checkpoint_request, on_exit_signal
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.checkpoint.files import snapshot_files
from kaitian_mpi.train.checkpoint.fingerprint import Fingerprint
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter, describe
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.state_transfer import copy_state
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_exchange import StepReports
from kaitian_mpi.train.summary import NAME

_MODEL = "checkpoints/model.pt"
_SNAPSHOT_SHARE = 0.05


class Saving(StepObserver):
    """Saves the run while these ranks train it. Every method is collective."""

    def __init__(self, run: Run, world: World, sampler: LoadAdaptiveSampler) -> None:
        """Handle signals from now on: until all ranks end the loop, or the next one begins."""
        self._run, self._world, self._sampler = run, world, sampler
        self._checkpoints = run.checkpoints
        self._restart = RestartRequest(run.setup.path if run.owns_files else None)
        self._is_to_end = False
        self._is_due = self._has_step = self._is_missing()
        self._has_reported = False
        self._snapshot_sec = self._snapshot_at = 0.0
        self._exit_copy: dict[str, Any] | None = None
        # Of the weights as the last step, or the script after it, has left them.
        is_marked = run.owns_files and run.state.shards is None
        self._mark = Fingerprint(run.state.model.parameters() if is_marked else ())
        run.signals.close()  # of the loop that a loss has ended
        run.signals.enter_context(self._saved_at_signals())
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
        if together:  # else a signal amid the recovery saves what the last step left
            self._run.signals.close()

    def save_and_stop(self) -> None:
        """Save a checkpoint between two steps, with which another job continues."""
        if not self._mark.matches():
            warn_rank_0(
                self._world,
                f"the weights were changed after step {self._progress.step}, and are saved as they "
                "are; if an average is swapped in, end the training first",
            )
        self._save()
        self._checkpoints.wait()
        self._report_written()
        progress, path = self._progress, self._run.setup.path
        self._event("stop", f"training was closed after step {progress.step}")
        self._run.write_summary(
            steps=progress.step, epochs=progress.epoch, bad_steps=progress.bad_steps
        )
        if path is not None:
            settings = self._run.config.spell(run_dir=str(path), resume="auto")
            warn_rank_0(self._world, resume_line(progress.step, progress.total_steps, settings))

    def save_due(self, script_has_run: bool = True) -> None:
        """Save what has been due since the last step, now that the script has followed it, too.

        An average of the weights, say, is part of what is saved.
        """
        if script_has_run:
            self._mark.take()
        if self._has_step:
            self._has_step = False
            if self._is_due:
                self._save()
            self._snapshot()

    def save_to_end(self) -> bool:
        """Save the state between two steps, on disk and in every host's memory, if asked to end."""
        if not self._is_to_end:
            return False
        self._is_to_end = False
        step = self._progress.step
        self._save()
        self._snapshot(always=True)
        self._checkpoints.wait()
        is_saved = any(each.last_written == step for each in self._checkpoints.writers)
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
        run, world, fault = self._run, self._world, ""
        enter_phase("writing the last checkpoint", limited=False)
        with self._saved_at_signals(), run.state.whole_weights(world, run.setup.path) as why:
            if world.rank == 0:
                try:
                    self._write_results(why)
                except StorageError as error:
                    fault = f"training is done, but {error}; {self._keep()}"
            fault = gather_values(world.comm, fault)[0]
            if fault:
                run.fault = AgreedError(fault, StorageError.exit_code)
            else:
                self._report_finish()

    def _write_results(self, why: OSError | None) -> None:
        """Write the weights, unless they are on disk already, and then the summary as finished.

        Existing files are kept. A checkpoint that did not fit is no error; `why` is one of weights.
        """
        run, folder = self._run, self._run.setup.folder
        self._checkpoints.wait()  # one that is still being written needs space
        if not folder.has(_MODEL):  # the disk may have been full only temporarily
            folder.save_model(run.state.weights() if why is None else {}, why)
        folder.require(_MODEL)
        if run.config.export:
            if why is not None:
                raise StorageError(f"{run.config.export} could not be written: {why.strerror}")
            from kaitian_mpi.train.weight_files import export_weights

            export_weights(run.config.export, run.state.model, run.state.model_state())
        folder.write(NAME, run.current_summary(finished=True).to_json())
        folder.require(NAME)

    def _keep(self) -> str:
        """Keep the state in memory, if there is room; return what the user should do."""
        step, path, checkpoints = self._progress.step, self._run.setup.path, self._checkpoints
        again = f"run the same command with --run-dir {path or 'FOLDER'} --resume auto"
        if checkpoints.on_disk is not None and checkpoints.on_disk.last_written == step:
            return f"step {step} is in its checkpoint: make room, and {again}"
        if self._run.state.shards is not None:
            return f"make room, and {again} to continue from the last checkpoint"
        name = snapshots_name(self._run.config.snapshots, os.environ) or secrets.token_hex(8)
        writer = checkpoints.in_memory or BackgroundWriter(snapshot_files(name))
        checkpoints.write(writer, self._run.state, self._metadata())
        writer.wait()
        if writer.last_written == step:
            return (
                f"step {step} is kept in this host's memory: make room, and {again} --snapshots "
                f"{name}"
            )
        return f"memory is full, too: make room, and {again} to continue from the last checkpoint"

    def _save(self, score: float | None = None) -> None:
        """Save a checkpoint, if there is a run folder; restart `--checkpoint-minutes`."""
        self._has_reported = False
        if self._checkpoints.on_disk is not None:
            enter_phase("saving a checkpoint", waits=True, limited=False)
            with self._run.saving(self._world):
                self._checkpoints.save(self._world, self._run.state, self._metadata(), score)
            self._run.request.is_made = False  # only now: a rank may be lost meanwhile

    def _snapshot(self, always: bool = False) -> None:
        """Save a snapshot in each host's memory, if it is due. Collective if the state is large.

        Also due after the first step, so that a restarted job needs no benchmark. If training
        waits for it, it is left out if it would take more than 5% of the time.
        """
        writer, step, world = self._checkpoints.in_memory, self._progress.step, self._world
        is_wanted = always or step == 1
        if writer is None or not (is_wanted or step % self._run.config.snapshot_every == 0):
            return
        begin = time.monotonic()
        between_sec = begin - self._snapshot_at + self._snapshot_sec
        is_wanted = is_wanted or self._snapshot_sec <= _SNAPSHOT_SHARE * between_sec
        hosts = [info.host for info in world.infos]
        if hosts.index(world.info.host) == world.rank and is_wanted:
            has_waited = self._checkpoints.write(writer, self._run.state, self._metadata())
            self._snapshot_at = time.monotonic()
            self._snapshot_sec = (self._snapshot_at - begin) * has_waited
        self._checkpoints.wait_if_large(world, self._run.state)

    def _report_finish(self) -> None:
        run, progress, epochs = self._run, self._progress, self._progress.epoch
        self._checkpoints.close()
        run.summary = run.current_summary(finished=True)
        self._report_written()
        text = f"finished after {epochs} epoch{'s' * (epochs != 1)}, {progress.step} steps"
        ranks, validation = run.summary.ranks or (), run.summary.validation
        run.sinks.event("finish", progress.step, text, ranks, validation=validation)
        if run.setup.path is not None:
            print_rank_0(self._world, f"results in {run.setup.path}")
        if run.config.export:
            print_rank_0(self._world, f"exported the weights to {run.config.export}")

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
        writer, progress, run = self._checkpoints.on_disk, self._progress, self._run
        every, step, shards = run.config.checkpoint_every, progress.step, run.state.shards
        is_due = progress.position == 0 or (every > 0 and step % every == 0)
        # At the start it is due if the loss of a rank would take along what no other has.
        may_lose = shards is not None and self._world.size > 1 and not shards.has_copies
        is_due &= bool(run.membership.losses) if step else run.membership.survives and may_lose
        if not is_due or not self._checkpoints.writers:
            return False
        known = (writer.last_submitted, writer.files.newest_step()) if writer is not None else ()
        return step not in gather_values(self._world.comm, known)[0]

    def _event(self, kind: str, text: str) -> None:
        self._run.sinks.event(kind, self._progress.step, text)

    def _report_written(self) -> None:
        """Report the checkpoint written in the background since the last call, if any."""
        writer = self._checkpoints.on_disk
        if writer is not None and (step := writer.newly_written()) is not None:
            self._run.sinks.event("checkpoint", step, f"the checkpoint of step {step} is written")

    def _refuse_request(self) -> None:
        """Say that nothing can be saved, if a signal has asked for it."""
        if self._run.request.is_made:
            self._run.request.clear()
            warn_rank_0(
                self._world,
                "a signal asks for a checkpoint, but there is no folder for it; training "
                "continues: set a run folder (run_dir) next time",
            )

    def _is_asked_to_end(self) -> bool:
        return self._run.request.ends_job or self._restart.is_made()

    @contextmanager
    def _saved_at_signals(self) -> Iterator[None]:
        """Save the state when a signal ends the job or requests it in the block. Not collective."""
        state = self._run.state
        state.lock.set_exit_save(
            self._save_at_exit,
            None if device_of(state.computation.device).is_host else self._copy_for_exit,
            after_fork=partial(torch.set_num_threads, 1),  # its compute threads are not forked
            after_change=self._mark.take,
        )
        callbacks: tuple[Callable[[], Any], ...] = (lambda: "",)
        if self._run.owns_files:
            callbacks = state.lock.save, state.lock.interrupt
        with (
            on_exit_signal(*callbacks, reports=self._world.rank == 0),
            on_checkpoint_request(self._run.request.make),
        ):
            yield

    def _copy_for_exit(self) -> None:
        """Copy the state to the host, for a forked process, which cannot use the device."""
        writer = self._checkpoints.on_disk
        assert writer is not None  # this rank owns the files
        if self._run.state.shards is None and self._mark.matches():
            self._exit_copy = copy_state(self._run.state.shared(), writer.take_spare())

    def _save_at_exit(self) -> str:
        """Save the last complete step, in a forked process that outlives this one.

        The state that differs between ranks is not saved. Returns a line that reports what was.
        """
        text = self._write_at_exit()
        # Only to the run folder: the other sinks belong to the parent process.
        event = Event(step=self._progress.step, time=time.time(), kind="stop", text=text)
        RunFolderSink(self._run.setup.folder).on_event(event)
        return text

    def _write_at_exit(self) -> str:
        state, step, writer = self._run.state, self._progress.step, self._checkpoints.on_disk
        if state.shards is not None:  # no rank has all of it, and the others cannot be asked
            return self._not_saved("the ranks have it in parts (--layout)")
        if step == 0:
            return "no step has completed yet; nothing was saved"
        content = self._exit_copy
        if content is None and device_of(state.computation.device).is_host and self._mark.matches():
            content = copy_state(state.shared(), share=True)
        if content is None:
            return self._not_saved(
                "the weights were changed after it (by swapping in an average, for example)"
            )
        assert writer is not None
        content |= {"rank_states": [], "metadata": self._metadata().to_json()}
        try:
            # A checkpoint of this step, with its score, may still be being written.
            writer.files.write(content, describe(state), only_new=step == writer.last_submitted)
        except (OSError, UserError) as error:
            text = f"step {step} could not be saved: {getattr(error, 'strerror', None) or error}"
            kept = writer.files.newest_step()
            return text if kept is None else f"{text}; the checkpoint of step {kept} is kept"
        return f"step {step} is saved: {self._to_resume} resumes from it"

    def _not_saved(self, why: str) -> str:
        """Return the line that the state is not saved at a signal, with what there is instead."""
        writer = self._checkpoints.on_disk
        assert writer is not None
        with suppress(OSError, UserError):  # what is then kept is said
            writer.complete_in_child()
        kept = writer.files.newest_step()
        last = "no checkpoint yet" if kept is None else f"the checkpoint of step {kept} is kept"
        return self._run.config.word(
            f"step {self._progress.step} is not saved, as {why}; {last}; SIGUSR2 to mpirun ends a "
            "job between two steps, once all is saved"
        )
