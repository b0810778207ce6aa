"""The loops that tests and benchmarks step through: a training without a run around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.replicate import ReplicateLayout
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan, profile_unmeasured
from kaitian_mpi.train.progress import count_steps
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, Task


class LoopMaker:
    """Makes loops that train a task, each from where the one before has stopped.

    Nothing is measured, no file is written, and no observer follows the steps, unless the caller
    adds some.

    Attributes:
        setup: the task without a run folder.
        state: what the loops train.
        layout: how the state is laid out; another one of its kind may follow before `make`.
    """

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        task: Task,
        layout: Layout | None = None,
        *,
        min_batch: int = 1,
        memory_format: str = "contiguous",
    ) -> None:
        """Lay a task out on the ranks of a world, in layout replicate by default. Collective.

        Args:
            config: its global batch size is that of the plans to come.
            world: the ranks of the default process group.
            task: the same on every rank.
            layout: how the task's state is laid out.
            min_batch: the smallest batch that the model trains on.
            memory_format: of images; as a plan has it.
        """
        self._config = config
        self._world = world
        self.layout = layout or ReplicateLayout()
        self.setup = self.layout.place(config, Setup(task, NoFolder()), world)
        computation = Computation(world.device, config.precision, memory_format)
        samples = len(self.setup.train)
        steps = count_steps(config, samples, config.global_batch_size, min_batch)
        self.state = self.layout.make_state(config, self.setup, computation, steps)
        self._loader = ShareLoader(self.setup.train, config.workers, pin_memory=False)

    def make(self, plan: Plan, commit: Callable[[bool], None] | None = None) -> Loop:
        """Return a loop that continues to train, by a plan. Collective.

        `commit` is called before a step or an evaluation takes effect, with whether this rank has
        done it; None: the ranks survive no loss.
        """
        self.layout.assign(self._config, self._world, self.state, plan)
        agreement = Commits(commit)
        engine = self.layout.engine(
            self._config, self._world, self.setup, self.state, plan, agreement.survives
        )
        return Loop(self._config, self.setup, engine, self._loader, agreement)

    def close(self) -> None:
        """End the loader's processes, after the last loop is closed."""
        self._loader.close()


class Commits(NamedTuple):
    """Calls a function at each commit; without one, the ranks survive no loss."""

    function: Callable[[bool], None] | None

    @property
    def survives(self) -> bool:
        """Whether there is a function to call."""
        return self.function is not None

    def commit(self, ok: bool = True) -> None:
        """Call the function with whether this rank has done its work."""
        if self.function is not None:
            self.function(ok)


def timed(world: World, steps: Iterator[object], count: int) -> float:
    """Return the slowest rank's seconds per step over the next `count` steps. Collective."""
    sleeping_barrier(world.comm)
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    return max(gather_values(world.comm, time.perf_counter() - began)) / count


def metadata_of(config: TrainingConfig, world: World, batch_sizes: list[int]) -> RunMetadata:
    """Return what a run saves with its state, of ranks that were not measured."""
    profiles = {info.place: profile_unmeasured(config, info) for info in world.infos}
    return RunMetadata(
        config=asdict(config),
        profiles=profiles,
        excluded_places=[],
        allreduce_algorithm="direct",
        active_places=list(profiles),
        batch_sizes=batch_sizes,
        failures=[],
        dataset_size="",
    )
