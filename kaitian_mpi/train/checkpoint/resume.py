"""Finds a checkpoint of an earlier job, checks that it fits, and restores it on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.network.residual import add_up
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import warn_rank_0
from kaitian_mpi.observe.folders import is_private
from kaitian_mpi.observe.tensor_files import TensorFile
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.checkpoint.folder_lock import wait_for_writer
from kaitian_mpi.train.checkpoint.format import Checkpoint
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.resume_rules import Changes, compare_flags
from kaitian_mpi.train.checkpoint.snapshots import snapshot_files
from kaitian_mpi.train.state import State
from kaitian_mpi.train.state_transfer import broadcast_state


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint of an earlier job, or none."""

    metadata: RunMetadata | None = None
    """The same on every rank; None if there is no checkpoint, or none was wanted."""
    progress: dict[str, Any] = field(default_factory=dict)
    """The fields of `Progress`; the same on every rank."""
    file: TensorFile | None = None
    """Holds the checkpoint's state, on the one rank that has read it."""
    name: str = ""
    """Its file and host, for messages."""


def find_checkpoint(
    config: TrainingConfig, world: World, run_folder: Path | None, resume: str
) -> FoundCheckpoint:
    """Find the newest checkpoint, on disk or in a host's memory. Collective.

    Args:
        config: `--keep-checkpoints` and `--snapshots`.
        world: all ranks.
        run_folder: the run folder on world rank 0; None if nothing is written.
        resume: `auto`, a checkpoint's .pt file, or empty for none.

    Raises:
        AgreedError: there are checkpoints but all are damaged, the named file is not an intact
            checkpoint, or it has another format.
    """
    own, damaged = None, ""
    with agree_on_errors(world.comm):
        if world.rank == 0 and resume:
            own, damaged = _on_disk(config, run_folder, resume)
        if resume == "auto":
            own = _in_memory(config, world, -1 if own is None else own.step) or own
    candidates = gather_values(world.comm, {"damaged": damaged} if own is None else _describe(own))
    steps = [candidate.get("step", -1) for candidate in candidates]
    source = steps.index(max(steps))
    if steps[source] < 0:
        if candidates[0]["damaged"]:
            raise AgreedError(candidates[0]["damaged"])
        if resume:
            where = "without a run folder" if run_folder is None else f"in {run_folder}"
            warn_rank_0(world, f"no checkpoint {where}: starting from scratch")
        return FoundCheckpoint()
    best = candidates[source]
    return FoundCheckpoint(
        RunMetadata.from_json(best["metadata"]),
        best["progress"],
        own.file if own is not None and world.rank == source else None,
        f"{best['name']} on {world.infos[source].host}",
    )


def check_resumable(
    config: TrainingConfig, world: World, found: FoundCheckpoint, dataset_size: str
) -> Changes:
    """Compare a checkpoint's settings and dataset with this job's; return the changed flags.

    Raises:
        AgreedError: the checkpoint belongs to another run.
    """
    metadata = found.metadata
    assert metadata is not None
    known = all(info.place in metadata.profiles for info in world.infos)
    changes = compare_flags(metadata.config, config, known)
    if changes.rejected:
        raise AgreedError(changes.rejected)
    if metadata.dataset_size != dataset_size:
        raise AgreedError(
            f"the dataset has {dataset_size}, but the checkpoint was made with "
            f"{metadata.dataset_size}; give the same data, or another --run-dir"
        )
    return changes


def is_over(config: TrainingConfig, progress: dict[str, Any]) -> bool:
    """Return whether nothing is left to train or evaluate after a checkpoint's progress."""
    steps = config.max_steps
    is_at_end = progress["epoch"] >= config.epochs or 0 < steps <= progress["step"]
    return progress["is_done"] and is_at_end


def hand_over(world: World, found: FoundCheckpoint, to: int, state: State) -> FoundCheckpoint:
    """Move the checkpoint to a rank that will train, if the one that read it will not. Collective.

    Args:
        world: all ranks.
        found: the checkpoint.
        to: the rank that receives it.
        state: this rank's, freshly initialized; on rank `to`, its tensors take the checkpoint's
            values.
    """
    holders = [rank for rank, has in enumerate(_have_file(world, found)) if has]
    if not holders or holders == [to]:
        return found
    file = found.file or TensorFile(None)
    receives = world.rank == to
    content = broadcast_state(
        *(world.comm, file.content, holders[0], receives),
        into=state.shared() if receives else None,
        release=file.release,
    )
    return replace(found, file=TensorFile(content) if receives else None)


def is_held(world: World, found: FoundCheckpoint) -> bool:
    """Return whether any of these ranks has read the checkpoint. Collective."""
    return any(_have_file(world, found))


def load_file(
    state: State, file: TensorFile | None, shares: Sequence[int] | None
) -> list[dict[str, Any]]:
    """Load the checkpoint on the rank that has read it; do nothing elsewhere. Not collective.

    Args:
        state: this rank's, freshly initialized.
        file: holds the checkpoint's state; None elsewhere.
        shares: the batch sizes of the ranks that saved it, if other ranks continue: then batch norm
            gets statistics pooled over all their samples. None if the same ranks continue.

    Returns:
        The states of the ranks that saved it; [] elsewhere.

    Raises:
        UserError: the checkpoint is of another model.
    """
    if file is None:
        return []
    saved = state.load_file(file)["rank_states"]
    if shares is not None and len(saved) == len(shares):
        state.load_pooled_statistics(saved, shares)
    return saved


def restore(world: World, state: State, found: FoundCheckpoint, seed: int) -> None:
    """Restore on every rank that trains the checkpoint that one of them has read. Collective.

    Raises:
        AgreedError: the checkpoint is of another model.
    """
    metadata, saved = found.metadata, []
    assert metadata is not None
    are_same_ranks = metadata.active_places == [info.place for info in world.infos]
    with agree_on_errors(world.comm):
        saved = load_file(state, found.file, None if are_same_ranks else metadata.batch_sizes)
    source = state.sync_to_latest(world)
    # If the rank that has read the checkpoint were not the source, the run would start at step 0.
    assert state.progress.step == found.progress["step"]
    of_ranks = {
        "rank_states": saved if are_same_ranks else [],
        "residuals": {} if are_same_ranks else add_up(each["residuals"] for each in saved),
    }
    of_ranks = broadcast_state(world.comm, of_ranks, source, receives=True)
    rank_states = of_ranks["rank_states"]
    if len(rank_states) == world.size:
        state.load_rank_state(rank_states[world.rank])
    else:
        torch.manual_seed((seed + state.progress.step) * world.size + world.rank)
        if world.rank == 0:  # one of those that send gradients to other hosts
            state.residuals.load_state_dict(of_ranks["residuals"])


def _have_file(world: World, found: FoundCheckpoint) -> list[bool]:
    return gather_values(world.comm, found.file is not None)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the part of a checkpoint that every rank receives."""
    return {
        "step": checkpoint.step,
        "name": checkpoint.path.name,
        "metadata": checkpoint.state["metadata"],
        "progress": checkpoint.state["progress"],
    }


def _on_disk(
    config: TrainingConfig, run_folder: Path | None, resume: str
) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint to resume from, or None and the reason if all are damaged."""
    if run_folder is not None:
        wait_for_writer(run_folder / "checkpoints")  # of a job that has just ended
    if resume != "auto":
        path = Path(resume)
        if not os.path.isfile(path):  # unlike Path.is_file, it never raises
            raise UserError(
                f"--resume: there is no file {path}; give auto or a checkpoint's .pt file"
            )
        return CheckpointFiles.load(path), ""
    if run_folder is None:  # a rank was lost before the first step
        return None, ""
    files = CheckpointFiles(run_folder / "checkpoints", config.keep_checkpoints)
    try:
        newest, steps = files.newest_good(), files.steps()
    except OSError as error:
        raise UserError(
            f"--resume: {files.folder} cannot be read: {error.strerror}; make it readable, or "
            "name another --run-dir"
        ) from error
    if newest is not None or not steps:
        return newest, ""
    return None, (
        f"--resume auto: none of the {len(steps)} checkpoints in {files.folder} is intact; "
        "restore one of them, or name another --run-dir to start from scratch"
    )


def _in_memory(config: TrainingConfig, world: World, after: int) -> Checkpoint | None:
    """Return this host's snapshot of a step after `after`, on the host's first rank.

    An earlier one is not read: reading and checking takes seconds.
    """
    hosts = [info.host for info in world.infos]
    snapshots = snapshot_files(config)
    if snapshots is None or hosts.index(world.info.host) != world.rank:
        return None
    if not is_private(snapshots.folder) or max(snapshots.steps(), default=-1) <= after:
        return None
    newest = snapshots.newest_good()
    return newest if newest is not None and newest.step > after else None
