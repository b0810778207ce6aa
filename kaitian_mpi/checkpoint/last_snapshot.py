"""Writing to disk the snapshot that a job has left in the host's memory."""

from __future__ import annotations

import logging
from pathlib import Path

from kaitian_mpi.checkpoint.files import CheckpointFiles
from kaitian_mpi.checkpoint.policy import SnapshotFiles
from kaitian_mpi.output.folders import MEMORY

_log = logging.getLogger(__name__)


def save_snapshot(name: str, run_folder: Path, keep_checkpoints: int) -> bool:
    """Write this host's snapshot to the run's checkpoints, if it is newer than all of them.

    Args:
        name: of the snapshots.
        run_folder: the run's.
        keep_checkpoints: as of `--keep-checkpoints`.

    Returns:
        Whether there is a checkpoint of the snapshot's step now, or no snapshot.

    Raises:
        OSError: the disk does not take it.
        UserError: the snapshot's folder is not this user's alone.
    """
    found = [SnapshotFiles(path).newest_good() for path in MEMORY.glob(f"kaitian-{name}-*")]
    snapshots = [snapshot for snapshot in found if snapshot is not None]
    if not snapshots:
        return True
    newest = max(snapshots, key=lambda snapshot: snapshot.step)
    files = CheckpointFiles(run_folder / "checkpoints", keep_checkpoints)
    if newest.step > max(files.steps(), default=-1):
        files.write(newest.state, newest.about)
        _log.info("step %d saved from memory: --resume auto resumes from it", newest.step)
    return True
