"""Saves the last complete step when a signal ends the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.reading import Event
from kaitian_mpi.observe.run_folder import RunFolderSink
from kaitian_mpi.runtime.signals import on_checkpoint_request, on_exit_signal
from kaitian_mpi.train.checkpoint.fingerprint import Fingerprint
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter, describe
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.state_transfer import copy_state


class ExitSave:
    """Saves in a forked process, which outlives this one; no method is collective.

    Attributes:
        mark: of the weights as the last step, or the script after it, has left them.
    """

    def __init__(self, run: Run, world: World, make_metadata: Callable[[], RunMetadata]) -> None:
        is_marked = run.owns_files and run.state.partition.is_whole
        self.mark = Fingerprint(run.state.model.parameters() if is_marked else ())
        self._run = run
        self._world = world
        self._make_metadata = make_metadata
        self._copy: dict[str, Any] | None = None

    @contextmanager
    def at_signals(self) -> Iterator[None]:
        """Save when a signal ends the job in the block, or pass on its request to the run."""
        state = self._run.state
        is_on_host = device_of(state.computation.device).is_host
        state.lock.set_exit_save(
            self._save,
            None if is_on_host else self._copy_to_host,
            after_fork=partial(torch.set_num_threads, 1),  # its compute threads are not forked
            after_change=self.mark.take,
            can_complete=lambda: state.partition.is_whole,
        )
        callbacks: tuple[Callable[[], Any], ...] = (lambda: "",)
        if self._run.owns_files:
            callbacks = state.lock.save, state.lock.interrupt
        with (
            on_exit_signal(*callbacks, reports=self._world.rank == 0),
            on_checkpoint_request(self._run.request.make),
        ):
            yield

    def write(self) -> str:
        """Write what can be saved of the last complete step; return a line that reports it.

        The state that differs between ranks is not saved.
        """
        state = self._run.state
        step = state.progress.step
        writer = self._writer
        if not state.partition.is_whole:  # no rank has all of it, and the others cannot be asked
            return self._not_saved("each rank has only a part of it (--layout)")
        if step == 0:
            return "no step has completed yet; nothing was saved"
        content = self._copy
        if content is None and device_of(state.computation.device).is_host and self.mark.matches():
            content = copy_state(state.shared(), share=True)
        if content is None:
            return self._not_saved(
                "the weights were changed after it (by swapping in an average, for example)"
            )
        content |= {"rank_states": [], "metadata": self._make_metadata().to_json()}
        try:
            # A checkpoint of this step, with its score, may still be being written.
            writer.files.write(content, describe(state), only_new=step == writer.last_submitted)
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", None) or error
            return f"step {step} could not be saved: {reason}; {writer.describe_kept()}"
        resume = self._run.config.spell(resume="auto")
        return f"step {step} is saved: {resume} resumes from it"

    @property
    def _writer(self) -> BackgroundWriter:
        writer = self._run.checkpoints.on_disk
        assert writer is not None  # this rank owns the files
        return writer

    def _copy_to_host(self) -> None:
        """Copy the state to the host, for a forked process, which cannot use the device."""
        state = self._run.state
        if state.partition.is_whole and self.mark.matches():
            self._copy = copy_state(state.shared(), self._writer.take_spare())

    def _save(self) -> str:
        """Save in the forked process; return a line that reports what was saved."""
        text = self.write()
        # Only to the run folder: the other sinks belong to the parent process.
        step = self._run.state.progress.step
        event = Event(step=step, time=time.time(), kind="stop", text=text)
        RunFolderSink(self._run.setup.folder).on_event(event)
        return text

    def _not_saved(self, why: str) -> str:
        """Return the line that the state is not saved at a signal, with what there is instead."""
        writer = self._writer
        with suppress(OSError, UserError):  # what is then kept is said
            writer.complete_in_child()
        return self._run.config.word(
            f"step {self._run.state.progress.step} is not saved, as {why}; "
            f"{writer.describe_kept()}; SIGUSR2 to mpirun ends a job between two steps, once all "
            "is saved"
        )
