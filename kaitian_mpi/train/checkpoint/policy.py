"""The checkpoint policy: saves the state, with its metadata, when it is due."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.folders import remove_private, snapshots_name
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.checkpoint.files import CheckpointFiles, snapshot_files
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter
from kaitian_mpi.train.state import State
from kaitian_mpi.train.state_transfer import copy_state, from_bytes, to_bytes

_MIN_BYTES = 64  # releases of torch differ in an optimizer's small tensors, such as its step
_SNAPSHOT_SHARE = 0.05


class Checkpointing:
    """Saves the state of a run: to the run's folder, and to each host's memory.

    World rank 0 of the active ranks writes the files; every rank contributes its own state.
    Training waits only for a copy in memory, if the state is at most `--checkpoint-copy-mb`. A
    larger one is written from where it is, without a copy, and training waits until it is written:
    on accelerators from a single copy in host memory, in the background.
    """

    def __init__(self, config: TrainingConfig, run_folder: Path | None) -> None:
        """Prepare; nothing is written yet."""
        self._config = config
        self._writes = run_folder is not None
        folder = (run_folder or Path()) / "checkpoints"
        self._files = CheckpointFiles(folder, config.keep_checkpoints)
        self._writer = BackgroundWriter(self._files)
        name = snapshots_name(config.snapshots, os.environ)
        self._snapshot_files = snapshot_files(name) if name else None
        self._snapshots = BackgroundWriter(self._snapshot_files) if self._snapshot_files else None
        self._snapshot_sec = self._snapshot_at = 0.0
        self._saved_step = -1
        self._reported_step: int | None = None
        self._exit_copy: dict[str, Any] | None = None
        self.restart_timer()

    @property
    def is_idle(self) -> bool:
        """Whether there are neither checkpoints nor snapshots while the run trains."""
        return not self._writes and self._snapshots is None

    def restart_timer(self) -> None:
        """Restart the timer for `--checkpoint-minutes`."""
        self._saved_at = time.monotonic()
        self._requested = self._reported = False

    def request(self) -> None:
        """Request a checkpoint after the current step; from any thread, on any rank."""
        self._requested = True

    def wants_checkpoint(self) -> bool:
        """Return whether a checkpoint is requested or due by time; True once per checkpoint."""
        minutes = (time.monotonic() - self._saved_at) / 60
        is_time = self._requested or 0 < self._config.checkpoint_minutes <= minutes
        if not is_time or self._reported or not self._writes:
            return False
        self._reported = True
        return True

    def is_due(self, step: int, requested: bool) -> bool:
        """Return whether to save after this step, the same on every rank, as is `requested`."""
        every = self._config.checkpoint_every
        return self._writes and (requested or (every > 0 and step % every == 0))

    def save(
        self, world: World, state: State, metadata: RunMetadata, score: float | None = None
    ) -> None:
        """Save the state. Collective."""
        self.restart_timer()
        if not self._writes:
            return
        self._saved_step = state.progress.step
        gathered = gather_bytes(world.comm, to_bytes(state.rank_state()), 0)
        if world.rank == 0:
            rank_states = [from_bytes(content) for content in gathered]
            self._submit(self._writer, state, metadata, rank_states, score)
        self._wait_for_writers(world, state)

    def snapshot(
        self,
        world: World,
        state: State,
        metadata: Callable[[], RunMetadata],
        always: bool = False,
    ) -> None:
        """Save a snapshot in each host's memory, if it is due. Collective if the state is large.

        Also due after the first step, so that a restarted job needs no benchmark. If training
        waits for it, it is left out if it would take more than 5% of the time. With `always`, it is
        due in any case.
        """
        step = state.progress.step
        is_wanted = always or step == 1
        if self._snapshots is None or not (is_wanted or step % self._config.snapshot_every == 0):
            return
        begin = time.monotonic()
        between_sec = begin - self._snapshot_at + self._snapshot_sec
        is_wanted = is_wanted or self._snapshot_sec <= _SNAPSHOT_SHARE * between_sec
        hosts = [info.host for info in world.infos]
        if hosts.index(world.info.host) == world.rank and is_wanted:
            has_waited = self._submit(self._snapshots, state, metadata())
            self._snapshot_at = time.monotonic()
            self._snapshot_sec = (self._snapshot_at - begin) * has_waited
        self._wait_for_writers(world, state)

    def save_for_restart(self, world: World, state: State, metadata: RunMetadata) -> bool:
        """Save the state on disk and in every host's memory, and wait for both. Collective.

        Returns whether it is in either; the same on every rank.
        """
        step = state.progress.step
        self.save(world, state, metadata)
        self.snapshot(world, state, lambda: metadata, always=True)
        self.wait()
        is_saved = world.rank == 0 and self.is_on_disk(step)
        if self._snapshots is not None:
            self._snapshots.wait()
            is_saved = is_saved or self._snapshots.last_written == step
        return any(gather_values(world.comm, is_saved))

    def prepare_exit(self, state: State) -> None:
        """Copy the state to the host, for `save_at_exit` in a forked process without the device."""
        self._exit_copy = copy_state(state.shared(), self._writer.take_spare())

    def save_at_exit(self, state: State, metadata: RunMetadata) -> str:
        """Save the last complete step, in a process forked from the one that trains.

        Not collective: the state that differs between ranks is not saved.

        Returns:
            A line that reports what was saved.
        """
        step = state.progress.step
        if step == 0:
            return "no step has completed yet: nothing is saved"
        content = self._exit_copy or copy_state(state.shared(), share=True)
        content |= {"rank_states": [], "metadata": metadata.to_json()}
        try:
            # A checkpoint of this step, with its score, may still be being written.
            only_new = step == self._saved_step
            self._files.write(content, _describe(state, None), only_new)
        except (OSError, UserError) as error:
            text = f"step {step} could not be saved: {getattr(error, 'strerror', None) or error}"
            with contextlib.suppress(OSError):
                if steps := self._files.steps():
                    text = f"{text}; the checkpoint of step {steps[-1]} is kept"
            return text
        return f"step {step} is saved: --resume auto resumes from it"

    def keep_in_memory(self, state: State, metadata: RunMetadata) -> str:
        """Save the state in this host's memory; return `--snapshots`'s name, "" if that is full."""
        name = snapshots_name(self._config.snapshots, os.environ) or secrets.token_hex(8)
        files = snapshot_files(name)
        writer = self._snapshots or BackgroundWriter(files)
        self._submit(writer, state, metadata)
        writer.wait()
        return name if files.steps() else ""

    def wait(self) -> None:
        """Wait until every submitted checkpoint is on disk or has failed."""
        self._writer.wait()

    def newly_written(self) -> int | None:
        """Return the step of the checkpoint that was written since the last call, if any was."""
        before, self._reported_step = self._reported_step, self._writer.last_written
        return self._reported_step if self._reported_step != before else None

    def is_on_disk(self, step: int) -> bool:
        """Return whether there is a checkpoint of this step."""
        if self._writes and self._writer.last_written != step:
            with contextlib.suppress(OSError):
                return step in self._files.steps()
        return self._writes and self._writer.last_written == step

    def close(self) -> None:
        """Remove the snapshots: the run is finished and on disk. To be called on every rank."""
        self._writer.close()
        if self._snapshots is not None and self._snapshot_files is not None:
            self._snapshots.close()
            remove_private(self._snapshot_files.folder)

    def _submit(
        self,
        writer: BackgroundWriter,
        state: State,
        metadata: RunMetadata,
        rank_states: Sequence[dict[str, Any]] = (),
        score: float | None = None,
    ) -> bool:
        """Have the state written; return whether training has waited, because it is large."""
        shared, description = state.shared(), _describe(state, score)
        more = {"rank_states": list(rank_states), "metadata": metadata.to_json()}
        if not self._is_large(shared):
            writer.submit(copy_state(shared, writer.take_spare()) | more, description)
            return False
        enter_phase("saving a large state", limited=False)
        if self._is_large(shared, on_host=True):
            writer.write_now(copy_state(shared, share=True) | more, description)
        else:
            writer.submit(copy_state(shared, self._only_spare()) | more, description)
        return True

    def _is_large(self, state: dict[str, Any], on_host: bool = False) -> bool:
        """Return whether a state, or the part of it in host memory, is too large to be copied."""
        tensors = [each for each in tensors_in(state) if each.is_cpu or not on_host]
        size = sum(each.nbytes for each in tensors if each.nbytes >= _MIN_BYTES)
        return size > self._config.checkpoint_copy_mb << 20

    def _only_spare(self) -> dict[str, Any] | None:
        """Return what any writer keeps, once all are done, so that there is only one copy."""
        writers = [self._writer] if self._snapshots is None else [self._writer, self._snapshots]
        for writer in writers:
            writer.wait()
        spares = [writer.take_spare() for writer in writers]
        return next((spare for spare in spares if spare is not None), None)

    def _wait_for_writers(self, world: World, state: State) -> None:
        """Wait for the ranks that write a large state, however long they take. Collective."""
        shared = state.shared()
        # These are certain to have the same size on every rank, or some ranks would not wait.
        if self._is_large({name: shared[name] for name in ("model", "optimizers")}):
            enter_phase("waiting for a large state to be saved", waits=True, limited=False)
            sleeping_barrier(world.comm)


def _describe(state: State, score: float | None) -> dict[str, Any]:
    progress = state.progress
    description = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
    return {**description, "score": score}
