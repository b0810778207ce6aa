"""How a job resumes a run that an earlier job has left: what each stage of the session needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from kaitian_mpi.checkpoint.metadata import RunMetadata
from kaitian_mpi.checkpoint.policy import Checkpointing
from kaitian_mpi.checkpoint.resume import (
    Found,
    check_resumable,
    find_checkpoint,
    is_held,
    is_over,
    restore,
)
from kaitian_mpi.checkpoint.resume_rules import Renewed
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.engine.setup import Ingredients, describe_start
from kaitian_mpi.engine.state import TrainingState
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import say
from kaitian_mpi.training.summary import NAME, Summary


@dataclass(frozen=True)
class Earlier:
    """What an earlier job has left, if anything."""

    found: Found = field(default_factory=Found)
    """Its last checkpoint."""
    renewed: frozenset[Renewed] = frozenset()
    """What the earlier job found out and this one has to find out again."""
    summary: Summary = field(default_factory=Summary)
    """Its results up to that checkpoint."""
    is_finished: bool = False
    """Whether the run is finished, with nothing left to do."""
    stood_by: bool = False
    """Whether this rank did not train at first."""
    begins_course: bool = False
    """Whether this rank knows that the run leaves its later checkpoints for good."""

    def remembered(self, what: Renewed) -> RunMetadata | None:
        """Return what the earlier job knew, if what it knew of this still holds."""
        return None if what in self.renewed else self.found.metadata

    def remembered_exclusion(self, world: World) -> RunMetadata | None:
        """Return the same about the ranks to exclude.

        They were found by comparison with the ranks that trained: it may not hold without those.
        """
        metadata = self.remembered(Renewed.EXCLUSION)
        places = {info.place for info in world.infos}
        return metadata if metadata is not None and places.issuperset(metadata.crew) else None


def find_earlier(config: TrainConfig, setup: Ingredients, world: World) -> Earlier:
    """Look for a checkpoint, if one is asked for, and log what has changed since. Collective.

    Args:
        config: `--resume`, and what is compared with the earlier job's settings.
        setup: of this job.
        world: all ranks.

    Raises:
        AgreedError: there is none that can be used, or it is of another run.
    """
    earlier = _compare(config, setup, world)
    if earlier.is_finished:
        setup.folder.confirm(NAME)  # for kaitian-supervise
        results = earlier.summary
        say(
            world,
            f"{setup.path} is finished ({results.epochs} epochs, {results.steps} steps): nothing "
            "left to train; more --epochs or --max-steps resume it",
        )
    else:
        describe_start(config, world, setup.folder)
    return earlier


def _compare(config: TrainConfig, setup: Ingredients, world: World) -> Earlier:
    found = find_checkpoint(config, world, setup.path, config.resume)
    if found.metadata is None:
        return Earlier()
    changes = check_resumable(config, world, found, setup.data_set)
    summary = Summary.from_json(gather_values(world.comm, setup.folder.read(NAME))[0])
    if _is_finished(config, found, summary):
        return Earlier(found, summary=summary, is_finished=True)
    for line in changes.lines:
        say(world, line)
    return Earlier(found, changes.renewed, results_until(found.progress["step"], summary))


def _is_finished(config: TrainConfig, found: Found, summary: Summary) -> bool:
    """Return whether the run has come to its end, with the results that are in its summary."""
    has_results = summary.finished and summary.steps == found.progress["step"]
    return config.resume == "auto" and has_results and is_over(config, found.progress)


def results_until(step: int, summary: Summary) -> Summary:
    """Return what a summary says, if it is of no later step than the run resumes from."""
    return summary if summary.steps is not None and summary.steps <= step else Summary()


def begin_or_resume(
    config: TrainConfig,
    setup: Ingredients,
    earlier: Earlier,
    world: World,
    state: TrainingState,
    lost: bool,
) -> Earlier:
    """Begin on the active ranks, or resume from what was found. Collective.

    Args:
        config: `--resume`, and the seed.
        setup: whose folder forgets the steps that are trained again.
        earlier: what was found.
        world: the active ranks.
        state: of this rank, as it was made.
        lost: whether ranks of this job have been lost.

    Returns:
        What was found: something else where whoever had read the checkpoint is lost.
    """
    resume, found = config.resume, earlier.found
    if lost and not is_held(world, found):
        # Whoever had read the checkpoint, or had trained, is lost.
        if not resume or any(gather_values(world.comm, earlier.stood_by)):
            resume = "auto"  # the others may have trained since the file that the user names
        found = find_checkpoint(config, world, setup.path, resume)
        earlier = replace(earlier, found=found)
    if found.metadata is None:
        state.is_begun = True
        setup.folder.cut_after(-1)
        return earlier
    restore(world, state, found, config.seed)
    setup.folder.cut_after(state.progress.step)
    say(world, f"resuming from step {state.progress.step} ({found.name})")
    return replace(earlier, begins_course=resume not in ("", "auto"))


def begin_course(
    config: TrainConfig,
    earlier: Earlier,
    world: World,
    checkpoints: Checkpointing,
    state: TrainingState,
    metadata: RunMetadata,
) -> Earlier:
    """Leave the later checkpoints of a run that resumes from one that the user names. Collective.

    Args:
        config: `--resume`.
        earlier: whose later checkpoints are left, once.
        world: the active ranks.
        checkpoints: of the run.
        state: as it was restored.
        metadata: what is saved with it.

    Returns:
        The same, with nothing left to leave.
    """
    # Not all ranks know: one that was on standby may have become active since the restore.
    if not any(gather_values(world.comm, earlier.begins_course)):
        return earlier
    aside = checkpoints.begin_course(world, state, metadata, Path(config.resume))
    if aside is not None:
        say(world, f"the run's other checkpoints are in {aside} from now on")
    return replace(earlier, begins_course=False)
