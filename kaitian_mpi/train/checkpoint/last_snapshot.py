"""Writes to disk the snapshot that a job has left in the host's memory."""

from __future__ import annotations

import logging
from pathlib import Path

from kaitian_mpi.observe.folders import SHM
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.checkpoint.snapshots import SnapshotFiles

_log = logging.getLogger(__name__)


def save_snapshot(name: str, run_folder: Path, keep_checkpoints: int) -> bool:
    """Write this host's snapshot to the run's checkpoints, if it is newer than all of them.

    Args:
        name: the snapshots' name, as in `--snapshots`.
        run_folder: the run folder.
        keep_checkpoints: as in `--keep-checkpoints`.

    Returns:
        True: the snapshot's step is on disk now, or there is no snapshot.

    Raises:
        OSError: the snapshot could not be written.
        UserError: other users can access the snapshot's folder.
    """
    found = [SnapshotFiles(path).newest_good() for path in SHM.glob(f"kaitian-{name}-*")]
    snapshots = [snapshot for snapshot in found if snapshot is not None]
    if not snapshots:
        return True
    newest = max(snapshots, key=lambda snapshot: snapshot.step)
    files = CheckpointFiles(run_folder / "checkpoints", keep_checkpoints)
    if newest.step > max(files.steps(), default=-1):
        files.write(newest.state, newest.description)
        _log.info("step %d saved from memory: --resume auto resumes from it", newest.step)
    return True
