"""How a job takes up a run that an earlier one has left: what it does about it at each stage."""

from __future__ import annotations

from pathlib import Path

from kaitian_mpi.checkpoint.metadata import Memory
from kaitian_mpi.checkpoint.policy import Checkpointing
from kaitian_mpi.checkpoint.resume import (
    Found,
    check_resumable,
    find_checkpoint,
    hand_over,
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


class Resumption:
    """What an earlier job has left, if anything, and what this one makes of it.

    Every method with a world is collective over it.

    Attributes:
        summary: what `summary.json` says of the run so far; empty for a new run.
        was_finished: whether the run is finished, with nothing left to do.
        stood_by: whether this rank does not train at first.
    """

    def __init__(self, config: TrainConfig, path: Path) -> None:
        """Look for nothing yet.

        Args:
            config: `--resume`, and what is compared with the earlier job's.
            path: the run's folder.
        """
        self._config, self._path = config, path
        self._found = Found()
        self._begins_course = False
        self.summary = Summary()
        self.was_finished = False
        self.stood_by = False

    @property
    def memory(self) -> Memory | None:
        """What the earlier job knew; None where there is none."""
        return self._found.memory

    def find(self, world: World, made: Ingredients) -> None:
        """Look for a checkpoint, if one is asked for, and say what has changed since."""
        config = self._config
        found = self._found = find_checkpoint(config, world, self._path, config.resume)
        if found.memory is not None:
            lines = check_resumable(config, world, found, made.data_set)
            earlier = Summary.from_json(gather_values(world.comm, made.folder.read(NAME))[0])
            if self._is_finished(earlier):
                self.was_finished, self.summary = True, earlier
                made.folder.confirm(NAME)  # for kaitian-supervise
                say(
                    world,
                    f"{self._path} is finished ({earlier.epochs} epochs, {earlier.steps} steps)"
                    ": nothing left to train; more --epochs or --max-steps resume it",
                )
                return
            for line in lines:
                say(world, line)
            self.summary = results_until(found.progress["step"], earlier)
        describe_start(config, world, made.folder)

    def remembers(self, what: Renewed) -> Memory | None:
        """Return what the earlier job knew, if what it knew of this still holds."""
        return None if what in self._found.renewed else self._found.memory

    def remembers_exclusion(self, world: World) -> Memory | None:
        """Return the same about the ranks to exclude.

        They were found by comparison with the ranks that trained: without one of those, who knows.
        """
        memory = self.remembers(Renewed.EXCLUSION)
        places = {info.place for info in world.infos}
        return memory if memory is not None and places.issuperset(memory.crew) else None

    def hand_over(self, world: World, to: int) -> None:
        """Have the checkpoint at rank `to`, which trains: the one that read it may be excluded."""
        self._found = hand_over(world, self._found, to)

    def restore(self, world: World, state: TrainingState, made: Ingredients, lost: bool) -> None:
        """Begin on the ranks that train, or resume from what was found.

        Args:
            world: the ranks that train.
            state: of this rank, as it was made.
            made: whose folder forgets the steps that are trained again.
            lost: whether ranks of this job have been lost.
        """
        resume = self._config.resume
        if lost and not is_held(world, self._found):
            # Whoever had read the checkpoint, or had trained, is lost.
            if not resume or any(gather_values(world.comm, self.stood_by)):
                resume = "auto"  # the others may have trained since the file that the user names
            self._found = find_checkpoint(self._config, world, self._path, resume)
        if self._found.memory is None:
            state.is_begun = True
            made.folder.cut_after(-1)
            return
        restore(world, state, self._found, self._config.seed)
        self._begins_course = resume not in ("", "auto")
        made.folder.cut_after(state.progress.step)
        say(world, f"resuming from step {state.progress.step} ({self._found.name})")

    def begin_course(
        self, world: World, checkpoints: Checkpointing, state: TrainingState, memory: Memory
    ) -> None:
        """Leave the course that the run had taken after a checkpoint that the user names, once.

        Args:
            world: the ranks that train.
            checkpoints: of the run.
            state: as it was restored.
            memory: what goes with it.
        """
        # Not all ranks know: one that stood by may have come in since the state was restored.
        if not any(gather_values(world.comm, self._begins_course)):
            return
        origin = Path(self._config.resume)
        aside = checkpoints.begin_course(world, state, memory, origin)
        self._begins_course = False
        if aside is not None:
            say(world, f"the run's other checkpoints are in {aside} from now on")

    def _is_finished(self, earlier: Summary) -> bool:
        """Return whether the run has come to its end, with the results that are in its summary."""
        progress = self._found.progress
        has_results = earlier.finished and earlier.steps == progress["step"]
        return self._config.resume == "auto" and has_results and is_over(self._config, progress)


def results_until(step: int, summary: Summary) -> Summary:
    """Return what a summary says, if it is of no later step than the run resumes from."""
    return summary if summary.steps is not None and summary.steps <= step else Summary()
