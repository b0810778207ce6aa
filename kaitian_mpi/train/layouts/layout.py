"""The interface of a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.engine import Engine
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan, Profile, Profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import StepObserver
from kaitian_mpi.train.task import Computation


class Layout(ABC):
    """The distribution of a run's model and optimizers over the ranks.

    A run has one, found before its first step, with what it was measured by: see `LAYOUTS`. It is
    asked `place`, `find_profiles` and `make_state` once; then, each time that some ranks begin to
    train, `plan`, `assign`, `planned_bytes` and `observers`.
    """

    name: ClassVar[str]
    """As `--layout` has it."""
    divides_state: ClassVar[bool] = True
    """Whether no rank has all of the model, its gradients and its optimizers' state. Then the
    memory of each rank is planned, a slow one is not excluded, as its memory counts, and no rank
    can save by itself."""
    compares_weights: ClassVar[bool] = True
    """Whether all ranks have the same weights, which can be compared and repaired."""
    equal_shares: ClassVar[str] = "equal shares"
    """The reason that is given for the first batch sizes, without a benchmark."""
    divides_samples: ClassVar[bool] = True
    """Whether each rank computes a share of the samples, which follows its speed; else all compute
    a part of each sample."""
    waits_within: ClassVar[str] = ""
    """What ranks wait for within a step, where they do not compute a share each."""

    engine: ClassVar[type[Engine]] = Engine
    """The class that computes steps."""

    def place(self, config: TrainingConfig, setup: Setup, world: World) -> Setup:
        """Bring the model to where it is to be trained; return the setup with it. Not collective.

        What is not done here is done by `make_state`.
        """
        return setup

    @abstractmethod
    def find_profiles(
        self, config: TrainingConfig, world: World, setup: Setup, earlier: Mapping[str, Profile]
    ) -> Profiles:
        """Return profiles: an `earlier` job's, benchmarked, or unmeasured ones. Collective."""

    @abstractmethod
    def make_state(
        self, config: TrainingConfig, setup: Setup, computation: Computation, total_steps: int
    ) -> State:
        """Create the training state. Not collective.

        Raises:
            UserError: the task cannot be trained so.
        """

    def plan(self, config: TrainingConfig, world: World, profiles: Profiles) -> Plan:
        """Plan the batch sizes of these ranks. Collective."""
        return profiles.plan(config, world)

    @abstractmethod
    def assign(self, config: TrainingConfig, world: World, state: State, plan: Plan) -> None:
        """Give each rank its part of the state; print which it is. Collective."""

    def planned_bytes(
        self, config: TrainingConfig, world: World, plan: Plan, profiles: Profiles
    ) -> list[int | None]:
        """Return the most bytes that each rank's device is to use; None if unknown."""
        return profiles.planned_bytes(world.infos, plan.batch_sizes)

    def observers(self, config: TrainingConfig, loop: Loop) -> Iterable[StepObserver]:
        """Return the observers of a loop's steps in this layout only. Collective."""
        return ()

    def describe(self, engine: Engine) -> dict[str, Any]:
        """Return the fields of `summary.json` on what it divides, as of now. Collective."""
        return engine.plan.describe(engine.world.infos)
