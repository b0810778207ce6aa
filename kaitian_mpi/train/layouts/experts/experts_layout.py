"""Layout experts: the dense part on every rank, each expert on one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kaitian_mpi.balance.ownership import NO_MIRROR
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.divided_step import check_parts
from kaitian_mpi.train.layouts.experts.engine import ExpertsEngine
from kaitian_mpi.train.layouts.experts.expert_owners import (
    ExpertOwners,
    check_experts,
    experts_of,
    find_mixtures,
)
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.moving import move_own
from kaitian_mpi.train.measure.plan import Plan, Profile, Profiles, unmeasured_profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Computation


class ExpertsLayout(Layout):
    """Each expert is on one rank, and perhaps a mirror, by speed and memory; all else on every one.

    The tokens of all ranks are sent to the ranks of their experts.
    """

    name = "experts"
    engine = ExpertsEngine

    @classmethod
    def find(cls, config: TrainingConfig, setup: Setup, world: World) -> ExpertsLayout:
        """Return the layout for a task, by its experts. Collective.

        Raises:
            UserError: the task cannot be trained so, or an expert does not fit a rank's memory.
        """
        check_parts(setup.task, "experts")
        check_experts(setup.task.model, find_mixtures(setup.task.model))
        return cls()

    def place(self, config: TrainingConfig, setup: Setup, world: World) -> Setup:
        """Move all but the experts to this rank's device."""
        model = setup.task.model
        experts = experts_of(find_mixtures(model))
        inside = {module for expert in experts for module in expert.modules()}
        for module in model.modules():
            if module not in inside:
                move_own(module, world.device)
        return setup

    def find_profiles(
        self, config: TrainingConfig, world: World, setup: Setup, known: Mapping[str, Profile]
    ) -> Profiles:
        return unmeasured_profiles(config, world, 1)

    def make_state(
        self, config: TrainingConfig, setup: Setup, computation: Computation, total_steps: int
    ) -> State:
        mixtures = find_mixtures(setup.task.model)
        make_owners = partial(ExpertOwners, mixtures=mixtures, device=computation.device)
        return State(
            setup.task,
            computation,
            total_steps,
            config.wire,
            moves=False,
            make_partition=make_owners,
        )

    def assign(self, config: TrainingConfig, world: World, state: State, plan: Plan) -> None:
        owners = state.partition
        assert isinstance(owners, ExpertOwners)
        count = len(experts_of(owners.mixtures))
        ranks = [number % world.size for number in range(count)]
        owners.assign_experts(world, ranks, [NO_MIRROR] * count)
