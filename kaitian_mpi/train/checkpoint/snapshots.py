"""Snapshots: a job's checkpoints in each host's memory, and how often a large one is made."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.observe.folders import (
    SHM,
    is_private,
    make_private,
    snapshot_folder,
    snapshots_name,
)
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.checkpoint.format import Checkpoint

_log = logging.getLogger(__name__)

_SHARE = 0.05


class SnapshotFiles(CheckpointFiles):
    """A job's snapshots in this host's memory; only this user can access them.

    Raises:
        UserError: from each method, if other users can access the folder.
    """

    def __init__(self, folder: Path) -> None:
        """Create the object only; the folder is not touched."""
        super().__init__(folder, keep=1)

    def write(
        self, state: dict[str, Any], description: dict[str, Any], only_new: bool = False
    ) -> Path:
        """Write a snapshot, as `CheckpointFiles.write`."""
        make_private(self.folder)
        return super().write(state, description, only_new)

    def newest_good(self) -> Checkpoint | None:
        """Return the newest intact snapshot, as `CheckpointFiles.newest_good`."""
        return super().newest_good() if is_private(self.folder) else None


def snapshot_files(config: TrainingConfig) -> SnapshotFiles | None:
    """Return this host's snapshots of a job; None if it keeps none."""
    name = snapshots_name(config.snapshots, os.environ)
    return SnapshotFiles(snapshot_folder(name)) if name else None


def save_snapshot(name: str, run_folder: Path, keep_checkpoints: int) -> None:
    """Write this host's snapshot of this name to the run's checkpoints, if it is the newest.

    Raises:
        OSError: the snapshot could not be written.
        UserError: other users can access the snapshot's folder.
    """
    newest = [SnapshotFiles(path).newest_good() for path in SHM.glob(f"kaitian-{name}-*")]
    files = CheckpointFiles(run_folder / "checkpoints", keep_checkpoints)
    for snapshot in newest:
        if snapshot is not None and snapshot.step > max(files.steps(), default=-1):
            files.write(snapshot.state, snapshot.description)
            _log.info("step %d saved from memory: --resume auto resumes from it", snapshot.step)


class Pace:
    """Leaves out snapshots for which training would wait more than 5% of the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no snapshot; `clock` returns seconds."""
        self._clock = clock
        self._sec = self._ended = 0.0

    def took(self, seconds: float) -> None:
        """Note that training has just waited this long for a snapshot."""
        self._sec, self._ended = seconds, self._clock()

    def allows(self) -> bool:
        """Return whether one more that takes as long may begin."""
        return self._sec <= _SHARE * (self._clock() - self._ended + self._sec)
