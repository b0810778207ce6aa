"""Layout pipeline: divides a model into stages, planned from its measured layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from kaitian_mpi.balance.pipeline_plan import replan
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.pipeline.chain import chain_of
from kaitian_mpi.train.layouts.pipeline.engine import PipelineEngine, show_plan
from kaitian_mpi.train.layouts.pipeline.measure import PipelineFacts, StagesPlan, find_facts
from kaitian_mpi.train.layouts.pipeline.stages import Stages
from kaitian_mpi.train.layouts.replanning import Proposal, Replanning
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import (
    Plan,
    Profile,
    Profiles,
    min_batch_by_layers,
    remembered_profiles,
    unmeasured_profiles,
)
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import StepObserver
from kaitian_mpi.train.task import Computation


class PipelineLayout(Layout):
    """Each rank has consecutive layers, with their gradients and the state of their optimizers."""

    name = "pipeline"
    compares_weights = False  # but for replicas of a stage, which are of one kind
    divides_samples = False
    waits_within = "stages waiting for each other"
    equal_shares = "of the first stage"
    engine = PipelineEngine

    def __init__(self, facts: PipelineFacts) -> None:
        """Plan the stages from these facts, and from what training shows the ranks to take."""
        self.facts = facts

    @classmethod
    def find(cls, config: TrainingConfig, setup: Setup, world: World) -> PipelineLayout:
        """Return the layout for a task, by its layers. Collective.

        Raises:
            UserError: the task cannot be trained so, or a layer does not fit a rank's memory.
        """
        return cls(find_facts(config, setup, world, takes_alike=config.balance == "off"))

    def find_profiles(
        self, config: TrainingConfig, world: World, setup: Setup, earlier: Mapping[str, Profile]
    ) -> Profiles:
        # Its layers are measured; no rank may have the memory for a step of the whole model.
        min_batch = min_batch_by_layers(setup.task.model)
        remembered = remembered_profiles(config, world, earlier, min_batch)
        return remembered or unmeasured_profiles(config, world, min_batch)

    def make_state(
        self, config: TrainingConfig, setup: Setup, computation: Computation, total_steps: int
    ) -> State:
        return State(
            setup.task,
            computation,
            total_steps,
            config.wire,
            moves=False,
            make_partition=partial(Stages, layers=chain_of(setup.task), device=computation.device),
        )

    def plan(self, config: TrainingConfig, world: World, profiles: Profiles) -> StagesPlan:
        return self.facts.plan(config, world, profiles.min_batch)

    def scale_times(self, factors: Mapping[str, float]) -> None:
        """Multiply the layers' times on some ranks by factors, by place."""
        self.facts = self.facts.scaled(factors)

    def assign(self, config: TrainingConfig, world: World, state: State, plan: Plan) -> None:
        assert isinstance(state.partition, Stages)
        assert isinstance(plan, StagesPlan)
        state.partition.assign_stages(world, plan.pipeline.stages)
        show_plan(world, plan.pipeline)

    def planned_bytes(
        self, config: TrainingConfig, world: World, plan: Plan, profiles: Profiles
    ) -> list[int | None]:
        assert isinstance(plan, StagesPlan)
        return [*plan.pipeline.bytes_by_rank]

    def observers(self, config: TrainingConfig, loop: Loop) -> Iterable[StepObserver]:
        if config.balance == "adaptive":
            yield Restaging(config, self, loop)


class Restaging(Replanning):
    """Finds out whether other stages are worth a move."""

    def __init__(self, config: TrainingConfig, layout: PipelineLayout, loop: Loop) -> None:
        """Follow a loop; `layout` plans the stages of the next one."""
        assert isinstance(loop.plan, StagesPlan)
        self._layout = layout
        self._plan = loop.plan.pipeline
        super().__init__(config, loop, len(self._plan.stages) * config.global_batch_size)

    def _propose(self, work_sec: list[float], steps_left: int) -> Proposal | None:
        world = self._loop.world
        min_batch = self._loop.plan.min_batch
        if world.rank != 0:
            return None
        job = self._layout.facts.job(self._config, world, min_batch)
        new_plan = replan(job, self._plan, work_sec, steps_left)
        return None if new_plan is None else Proposal(*new_plan)

    def _follow(self, factors: Mapping[str, float], facts: Any) -> None:
        self._layout.scale_times(factors)
