"""Resumes a run: finds a checkpoint of an earlier job, checks that it fits, and restores it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.residual import add_up
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.observe.folder_lock import wait_for_save
from kaitian_mpi.observe.folders import remove_private, snapshots_name
from kaitian_mpi.preflight.verdict import count_text
from kaitian_mpi.train.checkpoint.files import (
    Checkpoint,
    CheckpointFiles,
    run_files,
    snapshot_files,
)
from kaitian_mpi.train.checkpoint.metadata import EarlierJob, RunMetadata, compare_flags
from kaitian_mpi.train.membership import plan_standby
from kaitian_mpi.train.progress import most_epochs
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State, load_pooled_statistics, sync_to_latest
from kaitian_mpi.train.state_transfer import broadcast_state
from kaitian_mpi.train.summary import NAME, Summary
from kaitian_mpi.train.task import Computation


def find_earlier_job(config: TrainingConfig, setup: Setup, world: World) -> EarlierJob:
    """Look for a checkpoint, and log what has changed since. Collective."""
    earlier = find_checkpoint(config, world, setup.path, config.resume)
    if earlier.metadata is None:
        return earlier
    lines, invalidated = compare_flags(earlier.metadata.config, config)
    if earlier.metadata.dataset_size != setup.dataset_size:
        raise AgreedError(
            f"the dataset has {setup.dataset_size}, but the checkpoint was made with "
            f"{earlier.metadata.dataset_size}; give the same data, or another --run-dir"
        )
    for line in lines:
        print_rank_0(world, config.word(line))
    summary = Summary.from_json(gather_values(world.comm, setup.folder.read(NAME))[0])
    has_results = summary.finished and summary.steps == earlier.progress["step"]
    if config.resume == "auto" and has_results and is_over(config, earlier.progress):
        epochs = count_text(summary.epochs or 0, "epoch")
        steps = count_text(summary.steps or 0, "step")
        warn_rank_0(
            world,
            f"{setup.path} is finished ({epochs}, {steps}): nothing left to train; to continue it, "
            f"raise {config.word('--epochs or --max-steps')}",
        )
        return replace(earlier, summary=summary, is_finished=True)
    if summary.steps is None or summary.steps > earlier.progress["step"]:
        summary = Summary()  # of steps that are trained again
    return replace(earlier, invalidated=invalidated, summary=summary)


def find_checkpoint(
    config: TrainingConfig,
    world: World,
    run_folder: Path | None,
    resume: str,
    is_needed: bool = False,
) -> EarlierJob:
    """Find the newest checkpoint, on disk or in a host's memory. Collective.

    Unless it is needed, a line says if there is none.
    """
    found_here, damaged = None, 0
    with agree_on_errors(world.comm):
        if world.rank == 0:
            found_here, damaged = _on_disk(config, run_folder, resume)
        if resume == "auto":
            step_on_disk = -1 if found_here is None else found_here.step
            found_here = _in_memory(config, world, step_on_disk) or found_here
    candidate: tuple[Any, ...] = (-1, damaged)
    if found_here is not None:
        content = found_here.state
        candidate = found_here.step, content["metadata"], content["progress"], found_here.path.name
    candidates = gather_values(world.comm, candidate)
    source = max(range(world.size), key=lambda rank: candidates[rank][0])
    if candidates[source][0] < 0:
        if damaged := candidates[0][1]:
            raise AgreedError(
                f"--resume auto: none of the {damaged} checkpoints in {run_folder}/checkpoints is "
                "intact; restore one of them, or name another --run-dir to start from scratch"
            )
        if not is_needed:
            where = "without a run folder" if run_folder is None else f"in {run_folder}"
            warn_rank_0(world, f"no checkpoint {where}: starting from scratch")
        return EarlierJob()
    _, metadata, progress, name = candidates[source]
    file = found_here.file if found_here is not None and world.rank == source else None
    name = f"{name} on {world.infos[source].host}"
    return EarlierJob(RunMetadata.from_json(metadata), progress, file, name)


def is_over(config: TrainingConfig, progress: dict[str, Any]) -> bool:
    """Return whether nothing is left to train or evaluate after a checkpoint's progress."""
    steps = config.max_steps
    is_at_end = progress["epoch"] >= most_epochs(config) or 0 < steps <= progress["step"]
    return progress["is_done"] and is_at_end


def resume(
    config: TrainingConfig,
    setup: Setup,
    earlier: EarlierJob,
    excluded: Collection[int],
    state: State,
    world: World,
) -> EarlierJob:
    """Restore the checkpoint that was found on all ranks. Collective."""
    if not any(gather_values(world.comm, earlier.file is not None)):
        # The rank that had read it is lost.
        checkpoint = find_checkpoint(config, world, setup.path, config.resume)
        earlier = replace(checkpoint, invalidated=earlier.invalidated, summary=earlier.summary)
        if earlier.metadata is None:
            return earlier
    standby = plan_standby(world, config.spares, excluded)
    active = [world.infos[rank] for rank in standby.active(world.infos)]
    restore(world, state, earlier, config.seed, active)
    print_rank_0(world, f"resuming from step {state.progress.step} ({earlier.name})")
    if config.resume != "auto":
        with agree_on_errors(world.comm):
            _begin_branch(config, world, setup.path, state.progress.step)
    return replace(earlier, file=None)


def load_finished(config: TrainingConfig, setup: Setup, earlier: EarlierJob, world: World) -> State:
    """Give every rank's model a finished run's weights; export them if asked to. Collective."""
    computation = Computation(world.device, "fp32", "contiguous")
    # Else a device may have no memory for the whole.
    moves = not config.may_divide_state
    state = State(setup.task, computation, earlier.progress["step"], moves=moves)
    restore(world, state, earlier, config.seed, world.infos)
    with agree_on_errors(world.comm):
        if world.rank == 0 and config.export:
            from kaitian_mpi.train.weight_files import export_weights

            export_weights(config.export, setup.task.model)
    if config.export:
        print_rank_0(world, f"exported the weights to {config.export}")
    setup.folder.confirm(NAME)  # for kaitian-supervise
    return state


def restore(
    world: World, state: State, earlier: EarlierJob, seed: int, active: Sequence[RankInfo]
) -> None:
    """Restore on every rank the checkpoint that one of them has read. Collective."""
    metadata = earlier.metadata
    assert metadata is not None
    places = [info.place for info in active]
    are_same_ranks = metadata.active_places == places
    saved: list[dict[str, Any]] = []
    with agree_on_errors(world.comm):
        if earlier.file is not None:
            saved = state.load_file(earlier.file)["rank_states"]
            shares = metadata.batch_sizes
            if not are_same_ranks and len(saved) == len(shares):
                load_pooled_statistics(state, saved, shares)
    source = sync_to_latest(state, world)
    # If the rank that has read the checkpoint were not the source, the run would start at step 0.
    assert state.progress.step == earlier.progress["step"]
    of_ranks = {
        "rank_states": saved if are_same_ranks else [],
        "residuals": {} if are_same_ranks else add_up(content["residuals"] for content in saved),
    }
    of_ranks = broadcast_state(world.comm, of_ranks, source, receives=True)
    rank_states = of_ranks["rank_states"]
    place = world.info.place
    if len(rank_states) == len(active) and place in places:
        state.load_rank_state(rank_states[places.index(place)])
    else:
        torch.manual_seed((seed + state.progress.step) * world.size + world.rank)
        if place == places[0]:  # one of those that send gradients to other hosts
            state.residuals.load_state_dict(of_ranks["residuals"])


def _begin_branch(config: TrainingConfig, world: World, run_folder: Path | None, step: int) -> None:
    """Have `--resume auto` continue from the checkpoint that the user named. Not collective."""
    if name := snapshots_name(config.snapshots, os.environ):
        remove_private(snapshot_files(name).folder)
    if world.rank == 0 and run_folder is not None:
        files = run_files(run_folder, config.keep_checkpoints)
        try:
            if not files.steps():
                files.adopt(Path(config.resume), step)
        except OSError as error:
            raise UserError(
                f"--resume: {files.folder} cannot be written: {error.strerror}; make room there, "
                "or name another --run-dir"
            ) from error


def _on_disk(
    config: TrainingConfig, run_folder: Path | None, resume: str
) -> tuple[Checkpoint | None, int]:
    """Return the checkpoint to resume from; None if none is intact, with how many there are."""
    named = files = None
    if run_folder is not None:  # else a rank was lost before the first step
        files = run_files(run_folder, config.keep_checkpoints)
        wait_for_save(files.folder)  # of a job that has just ended
    if resume != "auto":
        if not os.path.isfile(resume):  # unlike Path.is_file, it never raises
            raise UserError(
                f"--resume: there is no file {resume}; give auto or a checkpoint's .pt file"
            )
        named = CheckpointFiles.load(Path(resume))
    if files is None:
        return named, 0
    try:
        steps = files.steps()
        if named is not None and steps and not files.is_newest(named):
            raise UserError(
                f"--resume {resume}: {run_folder} has other checkpoints; name a new "
                "--run-dir, or give --resume auto to continue the run that is there"
            )
        return named or files.newest_good(), len(steps)
    except OSError as error:
        raise UserError(
            f"--resume: {files.folder} cannot be read: {error.strerror}; make it readable, or "
            "name another --run-dir"
        ) from error


def _in_memory(config: TrainingConfig, world: World, after: int) -> Checkpoint | None:
    """Return this host's snapshot of a step after `after`, on the host's first rank."""
    hosts = [info.host for info in world.infos]
    name = snapshots_name(config.snapshots, os.environ)
    if not name or hosts.index(world.info.host) != world.rank:
        return None
    # An earlier one is not read: reading and checking takes seconds.
    return snapshot_files(name).newest_good(after)
