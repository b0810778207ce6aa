"""Writes a run's state, with its metadata, from a copy of it in a background thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_bytes
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.folders import remove_private, snapshots_name
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.checkpoint.files import CheckpointFiles, run_files, snapshot_files
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.state import State
from kaitian_mpi.train.state_transfer import copy_state, from_bytes, to_bytes

_log = logging.getLogger(__name__)

_MIN_BYTES = 64  # releases of torch differ in an optimizer's small tensors, such as its step


class Checkpoints:
    """A run's checkpoints in its folder, and its snapshots in each host's memory.

    World rank 0 of the active ranks writes the files; every rank contributes its own state.
    Training waits only for a copy in memory, if the state is at most `--checkpoint-copy-mb`. A
    larger one is written from where it is, without a copy, and training waits until it is written:
    on accelerators from a single copy in host memory, in the background.

    Attributes:
        on_disk: writes to the run folder; None without one.
        in_memory: writes to this host's memory; None without snapshots.
        writers: these, without None.
        saved_at: when a checkpoint in the run folder was last begun, or the run, by
            `time.monotonic`; kept over losses, which may come more often than checkpoints are due.
    """

    def __init__(self, config: TrainingConfig, run_folder: Path | None) -> None:
        self._max_copied = config.checkpoint_copy_mb << 20
        self.on_disk = self.in_memory = None
        self._folder = run_folder
        self.saved_at = time.monotonic()
        if run_folder is not None:
            self.on_disk = BackgroundWriter(run_files(run_folder, config.keep_checkpoints))
        name = snapshots_name(config.snapshots, os.environ)
        if name and not config.may_divide_state:
            self.in_memory = BackgroundWriter(snapshot_files(name))
        self.writers = [writer for writer in (self.on_disk, self.in_memory) if writer is not None]

    def save(
        self,
        world: World,
        state: State,
        metadata: RunMetadata,
        score: float | None = None,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        """Save the state in the run folder; there must be one. Collective.

        On rank 0, `on_piece` is called whenever a piece of what other ranks have has arrived.
        """
        self.saved_at = time.monotonic()
        shared, fault = state.collect(world, self._folder, on_piece)
        gathered = gather_bytes(world.comm, to_bytes(state.rank_state()))
        if world.rank == 0 and self.on_disk is not None:
            rank_states = [from_bytes(content) for content in gathered]
            if fault is None:
                self.write(self.on_disk, state, shared, metadata, rank_states, score)
            else:
                self.on_disk.fail(state.progress.step, fault)
        del shared  # which may be mapped files
        self.wait_if_large(world, state)

    def write(
        self,
        writer: BackgroundWriter,
        state: State,
        shared: dict[str, Any],
        metadata: RunMetadata,
        rank_states: list[dict[str, Any]] | None = None,
        score: float | None = None,
    ) -> bool:
        """Have a state written, of which `shared` is what all ranks share.

        Returns whether training has waited, because it is large.
        """
        description = describe(state, score)
        more = {"rank_states": rank_states or [], "metadata": metadata.to_json()}
        if state.partition.is_whole and not self._is_large(shared):
            writer.submit(copy_state(shared, writer.take_spare()) | more, description)
            return False
        enter_phase("saving a large state", limited=False)
        if not state.partition.is_whole or self._is_large(shared, on_host=True):
            writer.write_now(copy_state(shared, share=True) | more, description)
        else:
            self.wait()  # so that there is only one copy
            spares = [writer.take_spare() for writer in self.writers]
            spare = next((spare for spare in spares if spare is not None), None)
            writer.submit(copy_state(shared, spare) | more, description)
        return True

    def wait_if_large(self, world: World, state: State) -> None:
        """Wait for the ranks that write a large state, however long they take. Collective."""
        shared = state.shared()
        # These are certain to have the same size on every rank, or some ranks would not wait.
        if not state.partition.is_whole or self._is_large(
            {name: shared[name] for name in ("model", "optimizers")}
        ):
            enter_phase("waiting for a large state to be saved", waits=True, limited=False)
            sleeping_barrier(world.comm)

    def wait(self) -> None:
        """Wait until everything submitted is written or has failed."""
        for writer in self.writers:
            writer.wait()

    def close(self) -> None:
        """Remove the snapshots: the run is finished and on disk. To be called on every rank."""
        for writer in self.writers:
            writer.close()
        if self.in_memory is not None:
            remove_private(self.in_memory.files.folder)

    def _is_large(self, state: dict[str, Any], on_host: bool = False) -> bool:
        """Return whether a state, or the part of it in host memory, is too large to be copied."""
        dense = [tensor for tensor in tensors_in(state) if tensor.layout is torch.strided]
        sizes = [tensor.nbytes for tensor in dense if tensor.is_cpu or not on_host]
        return sum(size for size in sizes if size >= _MIN_BYTES) > self._max_copied


def describe(state: State, score: float | None = None) -> dict[str, Any]:
    """Return a checkpoint's description; the score is higher for a better model."""
    progress = state.progress
    numbers = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
    return {**numbers, "score": score}


class BackgroundWriter:
    """Writes checkpoints in a thread; the caller waits only for its own copy of the state.

    A job that ends with an exception completes its last checkpoint. A write that fails with OSError
    or UserError is logged: a full disk each time, a state that cannot be saved once. Any other
    exception is a bug, and a later call raises it.

    Attributes:
        files: where to.
        last_written: the step of the last checkpoint that this object wrote; None before the first.
        last_submitted: the step of the last checkpoint that it was given; -1 before the first.
        fault: why the last one could not be written; None if it was.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.last_written: int | None = None
        self.last_submitted = -1
        self.fault: str | None = None
        self._newly_written: int | None = None
        self._pool = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending: list[Future[None]] = []
        self._submitted: dict[str, Any] = {}
        self._description: dict[str, Any] = {}
        self._spare: dict[str, Any] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a submitted checkpoint is neither on disk nor has failed."""
        return not all(writing.done() for writing in self._pending)

    def submit(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        """Write a checkpoint in the background; return at once.

        While an earlier one is being written, only the newest is queued; one that it replaces is
        logged and never written.
        """
        step = description["step"]
        if self._pending and self._pending[-1].cancel():
            self._pending.pop()
            self._spare = self._submitted
            if step != self.last_submitted:  # at an epoch's end one with a score replaces it
                _log.warning(
                    "skipping the checkpoint of step %d: an earlier one is still being written; "
                    "the next is of step %d",
                    self.last_submitted,
                    step,
                )
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        self._submitted = state
        self._description = description
        self.last_submitted = step
        self._pending.append(self._pool.submit(self._work, state, description))

    def write_now(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        """Write a checkpoint after those submitted before; return when it is written."""
        self.last_submitted = description["step"]
        self.close()
        self._write(state, description)

    def describe_kept(self) -> str:
        """Return the checkpoint from which a later job would resume, as a part of a message."""
        step = self.files.newest_step()  # maybe of an earlier job
        if step is None:  # the disk is faulty
            step = self.last_written
        if step is None:
            return "there is no checkpoint yet"
        return f"the checkpoint of step {step} is kept"

    def fail(self, step: int, error: Exception) -> None:
        """Report that a step's checkpoint is not written."""
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) or reason != self.fault:
            _log.warning(
                "checkpoint of step %d could not be written: %s; training continues; %s",
                step,
                reason,
                self.describe_kept(),
            )
        self.fault = reason

    def take_spare(self) -> dict[str, Any] | None:
        """Return a state whose memory can be reused for the next copy; None if there is none."""
        spare = self._spare
        self._spare = None
        return spare

    def newly_written(self) -> int | None:
        """Return the step of the checkpoint written since the last call; None if none was."""
        step = self._newly_written
        self._newly_written = None
        return step

    def wait(self) -> None:
        """Wait until every submitted checkpoint is on disk or has failed."""
        while self._pending:
            self._pending.pop(0).result()

    def complete_in_child(self) -> None:
        """Write the last checkpoint submitted, in a forked process, unless it is on disk already.

        The writing thread is not forked, and the process that has it may be killed at any moment.

        Raises:
            OSError, UserError: as `CheckpointFiles.write` does.
        """
        if self.is_writing:
            self.files.write(self._submitted, self._description, only_new=True)

    def close(self) -> None:
        """Wait as `wait` does, and free the memory kept for reuse."""
        try:
            self.wait()
        finally:
            self._submitted = {}
            self._spare = None

    def _work(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        try:
            self._write(state, description)
        finally:
            self._spare = state

    def _write(self, state: dict[str, Any], description: dict[str, Any]) -> None:
        step = description["step"]
        try:
            self.files.write(state, description)
        except (OSError, UserError) as error:
            self.fail(step, error)
        else:
            self.last_written = self._newly_written = step
            self.fault = None
