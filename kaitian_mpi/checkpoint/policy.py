"""When the state is saved, and what is saved with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kaitian_mpi.checkpoint.files import CheckpointFiles
from kaitian_mpi.checkpoint.format import Checkpoint
from kaitian_mpi.checkpoint.metadata import RunMetadata
from kaitian_mpi.checkpoint.writer import BackgroundWriter, copy_to_host, without_copy
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.engine.state import TrainingState, from_bytes, to_bytes
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.folders import (
    is_private,
    make_private,
    remove_private,
    snapshot_folder,
    snapshots_name,
)


class SnapshotFiles(CheckpointFiles):
    """The snapshots of one job on this host, in its memory; only this user can reach them."""

    def __init__(self, folder: Path) -> None:
        """Create the object only; the folder is not touched."""
        super().__init__(folder, keep=1)

    def write(self, state: dict[str, Any], about: dict[str, Any]) -> Path:
        """Write a snapshot, as `CheckpointFiles.write`.

        Raises:
            UserError: the folder is not this user's alone.
        """
        make_private(self.folder)
        return super().write(state, about)

    def newest_good(self) -> Checkpoint | None:
        """Return the newest intact snapshot, as `CheckpointFiles.newest_good`.

        Raises:
            UserError: the folder is not this user's alone.
        """
        return super().newest_good() if is_private(self.folder) else None


def snapshot_files(config: TrainConfig) -> SnapshotFiles | None:
    """Return this host's snapshots of a job; None where it keeps none."""
    name = snapshots_name(config.snapshots, os.environ)
    return SnapshotFiles(snapshot_folder(name)) if name else None


class Checkpointing:
    """Saves the state of a run: to the run's folder, and to each host's memory.

    The rank that owns the files writes; every rank contributes its own state. Training waits only
    for a copy in memory.
    """

    def __init__(self, config: TrainConfig, run_folder: Path) -> None:
        """Prepare; nothing is written yet.

        Args:
            config: how often.
            run_folder: the run's folder, on whichever host writes.
        """
        self._config = config
        self._files = CheckpointFiles(run_folder / "checkpoints", config.keep_checkpoints)
        self._writer = BackgroundWriter(self._files)
        self._snapshots_name = snapshots_name(config.snapshots, os.environ)
        self._snapshot_files = snapshots = snapshot_files(config)
        self._snapshots = BackgroundWriter(snapshots) if snapshots is not None else None
        self._saved_step = -1
        self._exit_copy: dict[str, Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Restart the timer for `--checkpoint-minutes`."""
        self._saved_at = time.monotonic()
        self._was_asked = self._has_asked = False

    def ask(self) -> None:
        """Request a checkpoint after the current step. From any thread, on any rank."""
        self._was_asked = True

    def wants(self) -> bool:
        """Return, once, whether this rank finds it time for a checkpoint."""
        minutes = (time.monotonic() - self._saved_at) / 60
        is_time = self._was_asked or 0 < self._config.checkpoint_minutes <= minutes
        if not is_time or self._has_asked:
            return False
        self._has_asked = True
        return True

    def is_due(self, step: int, wanted: bool) -> bool:
        """Return whether to save after this step; the same on every rank.

        Args:
            step: the steps that are done.
            wanted: whether any rank has found it time, as all ranks know.
        """
        every = self._config.checkpoint_every
        return wanted or (every > 0 and step % every == 0)

    def save(
        self, world: World, state: TrainingState, metadata: RunMetadata, score: float | None = None
    ) -> None:
        """Save the state. Collective.

        Args:
            world: the ranks that train.
            state: between two steps.
            metadata: what goes with it.
            score: how good the model is, if it has just been evaluated; higher is better.
        """
        self.begin()
        self._saved_step = state.progress.step
        own = gather_bytes(world.comm, to_bytes(state.own()), 0)
        if world.rank == 0:
            parts = [from_bytes(content) for content in own]
            self._submit(self._writer, state, metadata, parts, score)

    def prepare_exit(self, state: TrainingState) -> None:
        """Copy the state to the host, for `save_at_exit` in a process without the device."""
        self._exit_copy = copy_to_host(state.shared(), self._writer.take_spare())

    def save_at_exit(self, state: TrainingState, metadata: RunMetadata) -> str:
        """Save the last complete step, in a process forked from the one that trains.

        Not collective: the state that only other ranks hold is not saved.

        Returns:
            A line on what has been saved.
        """
        step = state.progress.step
        if step == 0:
            return "no step has completed yet: nothing is saved"
        content = self._exit_copy or without_copy(state.shared())
        content |= {"own": [], "memory": metadata.to_json()}
        # The checkpoint of this step may still be in writing when the rank is killed; it has the
        # score.
        is_saved = step == self._saved_step
        write = self._files.write_once if is_saved else self._files.write
        try:
            write(content, _about(state, None))
        except OSError as error:
            with contextlib.suppress(OSError):
                if steps := self._files.steps():
                    kept = f"the checkpoint of step {steps[-1]} is kept"
                    return f"step {step} could not be saved: {error.strerror or error}; {kept}"
            return f"step {step} could not be saved: {error.strerror or error}"
        return f"step {step} is saved: --resume auto resumes from it"

    def begin_course(
        self, world: World, state: TrainingState, metadata: RunMetadata, origin: Path
    ) -> Path | None:
        """Let `--resume auto` return to where the run begins now, not to where it was. Collective.

        Args:
            world: the ranks that train.
            state: as it was loaded.
            metadata: what goes with it.
            origin: the checkpoint that it was loaded from, which the user has named.

        Returns:
            The folder that later checkpoints of the run are in now, on the rank that owns the
            files; None elsewhere, or where there were none.

        Raises:
            AgreedError: the run's folder cannot be written.
        """
        folder, step = None, state.progress.step
        is_own = gather_values(world.comm, self._files.holds(origin))[0]
        if not is_own:
            self.save(world, state, metadata)
        snapshots = self._snapshot_files
        with agree_on_errors(world.comm):
            if world.rank == 0:
                folder = self._leave_other_courses(step, origin if is_own else None)
            if snapshots is not None and is_private(snapshots.folder):
                snapshots.remove_after(step if is_own else -1)
        return folder

    def _leave_other_courses(self, step: int, origin: Path | None) -> Path | None:
        self._writer.wait()
        if origin is None and self._writer.last_written != step:
            raise UserError(
                f"--resume: the checkpoint could not be copied to {self._files.folder}; make room "
                "there, or name another --run-dir"
            )
        try:
            path = origin or self._files.newest_of(step)
            return self._files.set_aside(path, earlier=origin is None)
        except OSError as error:
            raise UserError(
                f"--resume: the later checkpoints in {self._files.folder} could not be moved "
                f"aside: {error.strerror}; name another --run-dir"
            ) from error

    def snapshot(
        self, world: World, state: TrainingState, metadata: Callable[[], RunMetadata]
    ) -> None:
        """Keep the state in this host's memory, every few steps. Not collective.

        After the first step as well, so that a restarted job needs no benchmark.
        """
        hosts = [info.host for info in world.infos]
        speaks_for_host = hosts.index(world.info.host) == world.rank
        step = state.progress.step
        due = step == 1 or step % self._config.snapshot_every == 0
        if self._snapshots is not None and due and speaks_for_host:
            self._submit(self._snapshots, state, metadata(), [], None)

    def wait(self) -> None:
        """Wait until everything submitted is on disk or has failed."""
        self._writer.wait()

    def is_on_disk(self, step: int) -> bool:
        """Return whether there is a checkpoint of this step."""
        if self._writer.last_written == step:
            return True
        try:
            return step in self._files.steps()
        except OSError:
            return False

    def keep_in_memory(self, state: TrainingState, metadata: RunMetadata) -> str:
        """Keep the state in this host's memory, since it cannot be written to disk.

        Returns:
            The name to give to `--snapshots`; empty where there is no snapshot, not even of an
            earlier step, because the memory is full as well.
        """
        name = self._snapshots_name or secrets.token_hex(8)
        files = SnapshotFiles(snapshot_folder(name))
        writer = self._snapshots or BackgroundWriter(files)
        self._submit(writer, state, metadata, [], None)
        writer.wait()
        return name if files.steps() else ""

    def close(self) -> None:
        """Remove the snapshots: the run is finished and on disk. On any rank."""
        self._writer.close()
        if self._snapshots is not None and self._snapshot_files is not None:
            self._snapshots.close()
            remove_private(self._snapshot_files.folder)

    @staticmethod
    def _submit(
        writer: BackgroundWriter,
        state: TrainingState,
        metadata: RunMetadata,
        own: list[dict[str, Any]],
        score: float | None,
    ) -> None:
        content = copy_to_host(state.shared(), writer.take_spare())
        content |= {"own": own, "memory": metadata.to_json()}
        writer.submit(content, _about(state, score))


def _about(state: TrainingState, score: float | None) -> dict[str, Any]:
    progress = state.progress
    about = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
    return {**about, "score": score}
