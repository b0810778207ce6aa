"""The checkpoint policy: saves the state, with its metadata, when it is due."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_bytes, gather_values, join_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.folders import is_private, remove_private, snapshot_folder, snapshots_name
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.snapshots import Pace, SnapshotFiles, snapshot_files
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter
from kaitian_mpi.train.state import State
from kaitian_mpi.train.state_transfer import copy_state, from_bytes, to_bytes

_MIN_BYTES = 64  # releases of torch differ in an optimizer's small tensors, such as its step


class Checkpointing:
    """Saves the state of a run: to the run's folder, and to each host's memory.

    World rank 0 of the active ranks writes the files; every rank contributes its own state.
    Training waits only for a copy in memory, if the state is at most `--checkpoint-copy-mb`. A
    larger one is written from where it is, without a copy, and training waits until it is written:
    on accelerators from a single copy in host memory, in the background.
    """

    def __init__(self, config: TrainingConfig, run_folder: Path | None) -> None:
        """Prepare; nothing is written yet.

        Args:
            config: the flags about checkpoints and snapshots.
            run_folder: the run's folder, on any host that may write; None: no checkpoint is
                written.
        """
        self._config = config
        self._writes = run_folder is not None
        folder = (run_folder or Path()) / "checkpoints"
        self._files = CheckpointFiles(folder, config.keep_checkpoints)
        self._writer = BackgroundWriter(self._files)
        self._snapshot_files = snapshots = snapshot_files(config)
        self._snapshots = BackgroundWriter(snapshots) if snapshots is not None else None
        self._saved_step = -1
        self._has_saved = False
        self._reported_step: int | None = None
        self._exit_copy: dict[str, Any] | None = None
        self._pace = Pace()
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
        """Save the state. Collective.

        Args:
            world: the ranks that train.
            state: between two steps.
            metadata: saved with the state.
            score: the model's score, if it has just been evaluated; higher is better.

        Raises:
            AgreedError: the state cannot be saved, and none of these ranks has saved it before;
                later this is a warning, as there is a checkpoint.
        """
        self.restart_timer()
        if not self._writes:
            return
        self._saved_step = state.progress.step
        self._check_first(world, state)
        gathered = gather_bytes(world.comm, to_bytes(state.rank_state()), 0)
        if world.rank == 0:
            rank_states = [from_bytes(content) for content in gathered]
            self._submit(self._writer, state, metadata, rank_states, score)
        self._wait_for_writers(world, state)

    def _check_first(self, world: World, state: State) -> None:
        fault: str | None = None if self._has_saved else ""
        try:
            if not self._has_saved:
                state.check_savable()
        except UserError as error:
            fault = str(error)
        faults = gather_values(world.comm, fault)
        self._has_saved = True
        if None not in faults and any(faults):
            raise AgreedError(join_errors(faults))

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
            reason = getattr(error, "strerror", None) or error
            with contextlib.suppress(OSError):
                if steps := self._files.steps():
                    kept = f"the checkpoint of step {steps[-1]} is kept"
                    return f"step {step} could not be saved: {reason}; {kept}"
            return f"step {step} could not be saved: {reason}"
        return f"step {step} is saved: --resume auto resumes from it"

    def begin_branch(
        self, world: World, state: State, metadata: RunMetadata, origin: Path
    ) -> Path | None:
        """Set aside the run's other checkpoints after a resume from `origin`, named by the user.

        So `--resume auto` will continue from there, or from later checkpoints of this job.
        Collective over the ranks that train.

        Returns:
            The folder to which the other checkpoints were moved, on the rank that writes the files;
            None elsewhere, or if there were none.

        Raises:
            AgreedError: the run folder cannot be written.
        """
        if not self._writes:
            return None
        folder, step = None, state.progress.step
        is_own = gather_values(world.comm, self._files.holds(origin))[0]
        if not is_own:
            self.save(world, state, metadata)
        snapshots = self._snapshot_files
        with agree_on_errors(world.comm):
            if world.rank == 0:
                folder = self._set_other_branches_aside(step, origin if is_own else None)
            if snapshots is not None and is_private(snapshots.folder):
                snapshots.remove_after(step if is_own else -1)
        return folder

    def _set_other_branches_aside(self, step: int, origin: Path | None) -> Path | None:
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
        hosts = [info.host for info in world.infos]
        is_first_on_host = hosts.index(world.info.host) == world.rank
        step = state.progress.step
        is_wanted = always or step == 1
        if self._snapshots is None or not (is_wanted or step % self._config.snapshot_every == 0):
            return
        if is_first_on_host and (is_wanted or self._pace.allows()):
            begin = time.monotonic()
            if self._submit(self._snapshots, state, metadata(), [], None):
                self._pace.took(time.monotonic() - begin)
        self._wait_for_writers(world, state)

    def save_for_restart(self, world: World, state: State, metadata: RunMetadata) -> bool:
        """Save the state on disk and in every host's memory, and wait for both. Collective.

        Returns:
            Whether it is on disk, or in any host's memory; the same on every rank.
        """
        step = state.progress.step
        self.save(world, state, metadata)
        self.snapshot(world, state, lambda: metadata, always=True)
        self.wait()
        is_saved = self._writes and world.rank == 0 and self.is_on_disk(step)
        if self._snapshots is not None:
            self._snapshots.wait()
            is_saved = is_saved or self._snapshots.last_written == step
        return any(gather_values(world.comm, is_saved))

    def wait(self) -> None:
        """Wait until every submitted checkpoint is on disk or has failed."""
        self._writer.wait()

    def newly_written(self) -> int | None:
        """Return the step of the checkpoint that was written since the last call, if any was."""
        step = self._writer.last_written
        is_new = step != self._reported_step
        self._reported_step = step
        return step if is_new else None

    def is_on_disk(self, step: int) -> bool:
        """Return whether there is a checkpoint of this step."""
        if not self._writes:
            return False
        if self._writer.last_written == step:
            return True
        try:
            return step in self._files.steps()
        except OSError:
            return False

    def keep_in_memory(self, state: State, metadata: RunMetadata) -> str:
        """Save the state in this host's memory, because it cannot be written to disk.

        Returns:
            The name for `--snapshots`; empty if there is no snapshot, not even of an earlier step,
            because the memory is full as well.
        """
        name = snapshots_name(self._config.snapshots, os.environ) or secrets.token_hex(8)
        files = SnapshotFiles(snapshot_folder(name))
        writer = self._snapshots or BackgroundWriter(files)
        self._submit(writer, state, metadata, [], None)
        writer.wait()
        return name if files.steps() else ""

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
        rank_states: list[dict[str, Any]],
        score: float | None,
    ) -> bool:
        """Have the state written; return whether training has waited, because it is large."""
        shared, description = state.shared(), _describe(state, score)
        more = {"rank_states": rank_states, "metadata": metadata.to_json()}
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
