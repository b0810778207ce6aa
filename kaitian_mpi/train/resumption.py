"""Resumes a run that an earlier job has trained: what each stage of the start needs for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, warn_rank_0
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.policy import Checkpointing
from kaitian_mpi.train.checkpoint.resume import (
    FoundCheckpoint,
    check_resumable,
    find_checkpoint,
    is_held,
    is_over,
    restore,
)
from kaitian_mpi.train.checkpoint.resume_rules import Invalidated
from kaitian_mpi.train.setup import Setup, describe_start
from kaitian_mpi.train.state import State
from kaitian_mpi.train.summary import NAME, Summary


@dataclass(frozen=True)
class EarlierJob:
    """What was found of an earlier job of the run, if anything."""

    found: FoundCheckpoint = field(default_factory=FoundCheckpoint)
    """Its last checkpoint."""
    invalidated: frozenset[Invalidated] = frozenset()
    """Results of the earlier job that this one has to determine again."""
    summary: Summary = field(default_factory=Summary)
    """Its summary up to that checkpoint."""
    is_finished: bool = False
    """Whether the run is finished, so that nothing is left to do."""
    was_on_standby: bool = False
    """Whether this rank of the present job was on standby at first."""
    begins_branch: bool = False
    """Whether the user named the checkpoint, so that later ones are still to be set aside."""

    def remembered(self, what: Invalidated) -> RunMetadata | None:
        """Return the earlier job's metadata, if its result for `what` is still valid."""
        return None if what in self.invalidated else self.found.metadata

    def remembered_exclusion(self, world: World) -> RunMetadata | None:
        """Return the earlier job's metadata, if its choice of excluded ranks is still valid.

        They were compared with the ranks that trained, so all of those must be present again.
        """
        metadata = self.remembered(Invalidated.EXCLUSION)
        places = {info.place for info in world.infos}
        return (
            metadata if metadata is not None and places.issuperset(metadata.active_places) else None
        )


def find_earlier_job(config: TrainingConfig, setup: Setup, world: World) -> EarlierJob:
    """Look for a checkpoint, if `--resume` is given, and log what has changed. Collective.

    Raises:
        AgreedError: there is no usable checkpoint, or it belongs to another run.
    """
    earlier = _compare(config, setup, world)
    if earlier.is_finished:
        epochs, steps = earlier.summary.epochs, earlier.summary.steps
        done = f"{epochs} epoch{'s' * (epochs != 1)}, {steps} steps"
        warn_rank_0(
            world,
            f"{setup.path} is finished ({done}): nothing left to train; to continue it, raise "
            "--epochs or --max-steps",
        )
    else:
        describe_start(config, world, setup.folder)
    return earlier


def _compare(config: TrainingConfig, setup: Setup, world: World) -> EarlierJob:
    found = find_checkpoint(config, world, setup.path, config.resume)
    if found.metadata is None:
        return EarlierJob()
    changes = check_resumable(config, world, found, setup.dataset_size)
    summary = Summary.from_json(gather_values(world.comm, setup.folder.read(NAME))[0])
    if _is_finished(config, found, summary):
        return EarlierJob(found, summary=summary, is_finished=True)
    for line in changes.lines:
        print_rank_0(world, line)
    return EarlierJob(found, changes.invalidated, results_until(found.progress["step"], summary))


def _is_finished(config: TrainingConfig, found: FoundCheckpoint, summary: Summary) -> bool:
    """Return whether the run has ended and its summary has the results."""
    has_results = summary.finished and summary.steps == found.progress["step"]
    return config.resume == "auto" and has_results and is_over(config, found.progress)


def results_until(step: int, summary: Summary) -> Summary:
    """Return a summary, or an empty one if it is of a later step than the run resumes from."""
    return summary if summary.steps is not None and summary.steps <= step else Summary()


def begin_or_resume(
    config: TrainingConfig,
    setup: Setup,
    earlier: EarlierJob,
    world: World,
    state: State,
    lost: bool,
) -> EarlierJob:
    """Start from scratch, or resume from what was found. Collective over the active ranks.

    Returns:
        What was found, which differs if the rank that had read the checkpoint is lost.
    """
    resume, found = config.resume, earlier.found
    if lost and not is_held(world, found):
        # The rank that had read the checkpoint, or the ranks that had trained, are lost.
        if not resume or any(gather_values(world.comm, earlier.was_on_standby)):
            resume = "auto"  # the others may have trained since the file that the user names
        found = find_checkpoint(config, world, setup.path, resume)
        earlier = replace(earlier, found=found)
    if found.metadata is None:
        state.is_begun = True
        setup.folder.cut_after(-1)
        return earlier
    restore(world, state, found, config.seed)
    setup.folder.cut_after(state.progress.step)
    print_rank_0(world, f"resuming from step {state.progress.step} ({found.name})")
    # The file is no longer needed: the ranks have the state.
    return replace(
        earlier, found=replace(found, file=None), begins_branch=resume not in ("", "auto")
    )


def begin_branch(
    config: TrainingConfig,
    earlier: EarlierJob,
    world: World,
    checkpoints: Checkpointing,
    state: State,
    metadata: RunMetadata,
) -> EarlierJob:
    """Set later checkpoints aside if the user named the one to resume from. Collective.

    Returns:
        The same, with this done.
    """
    # Not all ranks know it: one may have become active since the restore.
    if not any(gather_values(world.comm, earlier.begins_branch)):
        return earlier
    aside = checkpoints.begin_branch(world, state, metadata, Path(config.resume))
    if aside is not None:
        print_rank_0(world, f"the run's other checkpoints are now in {aside}")
    return replace(earlier, begins_branch=False)
