"""Layout replicate: every rank has the whole model, and the whole state of its optimizers."""

from __future__ import annotations

from collections.abc import Mapping

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.measure.plan import Plan, Profile, Profiles, find_profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Computation


class ReplicateLayout(Layout):
    """Gradients are summed, and each rank applies the whole step."""

    name = "replicate"
    divides_state = False

    def find_profiles(
        self, config: TrainingConfig, world: World, setup: Setup, earlier: Mapping[str, Profile]
    ) -> Profiles:
        return find_profiles(config, world, setup, earlier)

    def make_state(
        self, config: TrainingConfig, setup: Setup, computation: Computation, total_steps: int
    ) -> State:
        return State(setup.task, computation, total_steps, config.wire)

    def assign(self, config: TrainingConfig, world: World, state: State, plan: Plan) -> None:
        """Do nothing: each rank has all of it."""
