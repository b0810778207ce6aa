"""Resuming a run from what an earlier job has left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kaitian_mpi.checkpoint.files import CheckpointFiles
from kaitian_mpi.checkpoint.folder_lock import wait_for_writer
from kaitian_mpi.checkpoint.format import Checkpoint
from kaitian_mpi.checkpoint.metadata import RunMetadata
from kaitian_mpi.checkpoint.policy import snapshot_files
from kaitian_mpi.checkpoint.resume_rules import Changes, compare_flags
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.engine.state import TrainingState, from_bytes, to_bytes
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, broadcast_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import say


@dataclass(frozen=True)
class Found:
    """What an earlier job has left."""

    metadata: RunMetadata | None = None
    """The same on every rank; None where nothing was found, or asked for."""
    progress: dict[str, Any] = field(default_factory=dict)
    """How far the checkpoint is, on every rank: the fields of `Progress`."""
    content: dict[str, Any] | None = None
    """The checkpoint, on the one rank that holds it."""
    name: str = ""
    """Where it was."""


def find_checkpoint(config: TrainConfig, world: World, run_folder: Path, resume: str) -> Found:
    """Find the newest checkpoint, on disk or in a host's memory. Collective.

    Args:
        config: `--keep-checkpoints` and `--snapshots`.
        world: the ranks.
        run_folder: as world rank 0 sees it.
        resume: `auto`, a checkpoint's .pt file, or empty for none.

    Raises:
        AgreedError: there are checkpoints and none can be read, the file that is named is no good
            checkpoint, or another version of this package has written it.
    """
    own, damaged = None, ""
    with agree_on_errors(world.comm):
        if world.rank == 0 and resume:
            own, damaged = _on_disk(config, run_folder, resume)
        in_memory = _in_memory(config, world) if resume == "auto" else None
    if in_memory is not None and (own is None or in_memory.step > own.step):
        own = in_memory
    candidates = gather_values(world.comm, {"damaged": damaged} if own is None else _describe(own))
    steps = [one.get("step", -1) for one in candidates]
    source = steps.index(max(steps))
    if steps[source] < 0:
        if candidates[0]["damaged"]:
            raise AgreedError(candidates[0]["damaged"])
        if resume:
            say(world, f"found no checkpoint in {run_folder}: starting from scratch")
        return Found()
    best = candidates[source]
    return Found(
        RunMetadata.from_json(best["memory"]),
        best["progress"],
        own.state if own is not None and world.rank == source else None,
        f"{best['name']} on {world.infos[source].host}",
    )


def check_resumable(config: TrainConfig, world: World, found: Found, data_set: str) -> Changes:
    """Check a checkpoint's settings against those of now.

    Args:
        config: the settings of this job.
        world: its ranks.
        found: a checkpoint.
        data_set: what tells this job's data set from others.

    Returns:
        What has changed, and what becomes of it.

    Raises:
        AgreedError: they are of different runs.
    """
    metadata = found.metadata
    assert metadata is not None
    known = all(info.place in metadata.profiles for info in world.infos)
    changes = compare_flags(metadata.config, config, known)
    if changes.refused:
        raise AgreedError(changes.refused)
    if metadata.data_set not in ("", data_set):
        raise AgreedError(
            f"the data set: found {data_set}, needed {metadata.data_set}, with which the "
            "checkpoint was made; give the same data, or another --run-dir"
        )
    return changes


def is_over(config: TrainConfig, progress: dict[str, Any]) -> bool:
    """Return whether nothing is left to train and to evaluate after a checkpoint.

    Args:
        config: the epochs and steps of the run.
        progress: the fields of `Progress`.
    """
    steps = config.max_steps
    has_come_to_its_end = progress["epoch"] >= config.epochs or 0 < steps <= progress["step"]
    return progress["is_done"] and has_come_to_its_end


def hand_over(world: World, found: Found, to: int) -> Found:
    """Give the checkpoint to a rank that trains, if the rank that read it will not. Collective.

    Args:
        world: all ranks.
        found: a checkpoint.
        to: the rank that takes it.
    """
    holders = [rank for rank, has in enumerate(_who_holds(world, found)) if has]
    if not holders or holders == [to]:
        return found
    content = broadcast_bytes(
        world.comm, to_bytes(found.content) if found.content is not None else None, holders[0]
    )
    return replace(found, content=from_bytes(content) if world.rank == to else None)


def is_held(world: World, found: Found) -> bool:
    """Return whether any of these ranks has the checkpoint's content. Collective."""
    return any(_who_holds(world, found))


def load_content(
    state: TrainingState, content: dict[str, Any] | None, shares: Sequence[int] | None
) -> None:
    """Load what this rank has read, if it has read anything. Not collective.

    Args:
        state: of this rank, as it was made.
        content: of the checkpoint.
        shares: the batch sizes of the ranks that saved it, where other ranks go on: then each gets
            the statistics of all their samples. None where the same ranks do.

    Raises:
        UserError: it is of another model.
    """
    if content is None:
        return
    state.load_shared(content)
    if shares is not None and len(content["own"]) == len(shares):
        state.load_mixture(content["own"], shares)


def restore(world: World, state: TrainingState, found: Found, seed: int) -> None:
    """Give every rank the state of the checkpoint that one of them holds. Collective.

    Args:
        world: the ranks that train.
        state: of this rank.
        found: the checkpoint.
        seed: of the run.

    Raises:
        AgreedError: it is of another model.
    """
    metadata, content = found.metadata, found.content
    assert metadata is not None
    are_same_ranks = metadata.crew == [info.place for info in world.infos]
    with agree_on_errors(world.comm):
        load_content(state, content, None if are_same_ranks else metadata.batch_sizes)
    source = state.even_out(world)
    # A rank that has read a checkpoint and is not heard would have the run begin at step 0.
    assert state.progress.step == found.progress["step"]
    own = [] if content is None or not are_same_ranks else content["own"]
    content_of_ranks = broadcast_bytes(
        world.comm, to_bytes({"own": own}) if world.rank == source else None, source
    )
    own = from_bytes(content_of_ranks)["own"]
    if len(own) == world.size:
        state.load_own(own[world.rank])
    else:
        torch.manual_seed((seed + state.progress.step) * world.size + world.rank)


def _who_holds(world: World, found: Found) -> list[bool]:
    return gather_values(world.comm, found.content is not None)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what every rank gets to know of a checkpoint."""
    return {
        "step": checkpoint.step,
        "name": checkpoint.path.name,
        "memory": checkpoint.state["memory"],
        "progress": checkpoint.state["progress"],
    }


def _on_disk(config: TrainConfig, run_folder: Path, resume: str) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint, or why there is none although there should be one."""
    wait_for_writer(run_folder / "checkpoints")  # of a job that has only just ended
    if resume != "auto":
        path = Path(resume)
        if not os.path.isfile(path):  # which never raises, as Path.is_file does
            raise UserError(
                f"--resume: found no file {path}, needed auto or a checkpoint's .pt file"
            )
        return CheckpointFiles.load(path), ""
    files = CheckpointFiles(run_folder / "checkpoints", config.keep_checkpoints)
    try:
        found, steps = files.newest_good(), files.steps()
    except OSError as error:
        raise UserError(
            f"--resume: {files.folder} cannot be read: {error.strerror}; make it readable, or "
            "name another --run-dir"
        ) from error
    if found is not None or not steps:
        return found, ""
    return None, (
        f"--resume auto: found {len(steps)} checkpoints in {files.folder} of which none can be "
        "used; restore one of them, or name another --run-dir to start from scratch"
    )


def _in_memory(config: TrainConfig, world: World) -> Checkpoint | None:
    """Return this host's snapshot, on the host's first rank."""
    hosts = [info.host for info in world.infos]
    snapshots = snapshot_files(config)
    if snapshots is None or hosts.index(world.info.host) != world.rank:
        return None
    return snapshots.newest_good()
