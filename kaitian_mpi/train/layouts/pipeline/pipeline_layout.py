"""Layout pipeline: divides a model into stages, planned from its measured layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from kaitian_mpi.balance.pipeline_plan import replan
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.pipeline.chain import chain_of
from kaitian_mpi.train.layouts.pipeline.engine import PipelineEngine, show_plan
from kaitian_mpi.train.layouts.pipeline.measure import PipelineFacts, StagesPlan, find_facts
from kaitian_mpi.train.layouts.pipeline.stages import Stages
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
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports
from kaitian_mpi.train.task import Computation

_WINDOW, _LEAST_STEPS = 10, 4


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
        self, config: TrainingConfig, world: World, setup: Setup, known: Mapping[str, Profile]
    ) -> Profiles:
        # Its layers are measured; no rank may have the memory for a step of the whole model.
        min_batch = min_batch_by_layers(setup.task.model)
        remembered = remembered_profiles(config, world, known, min_batch)
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


class Restaging(StepObserver):
    """Finds out, when epochs end and checkpoints are due, whether other stages are worth a move."""

    def __init__(self, config: TrainingConfig, layout: PipelineLayout, loop: Loop) -> None:
        """Follow a loop; `layout` plans the stages of the next one."""
        self._config = config
        self._layout = layout
        self._loop = loop
        assert isinstance(loop.plan, StagesPlan)
        self._plan = loop.plan.pipeline
        self._samples = len(self._plan.stages) * config.global_batch_size
        self._seconds: deque[np.ndarray] = deque(maxlen=_WINDOW)

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if reports is None:
            return
        times, every = reports.times, self._config.checkpoint_every
        if times.samples.sum() == self._samples and (times.steps > 0).all():
            self._seconds.append(times.work_sec)
        if reports.wants_checkpoint.any() or (every and step.number % every == 0):
            self.epoch_ends()

    def epoch_ends(self) -> None:
        loop, progress = self._loop, self._loop.progress
        if len(self._seconds) < _LEAST_STEPS:
            return
        world = loop.world
        new_plan = None
        if world.rank == 0:
            job = self._layout.facts.job(self._config, world, loop.plan.min_batch)
            work, left = np.median(self._seconds, axis=0), progress.total_steps - progress.step
            new_plan = replan(job, self._plan, work.tolist(), left)
        self._seconds.clear()
        if (new_plan := gather_values(world.comm, new_plan)[0]) is None:
            return
        factors, text = new_plan
        by_place = {info.place: f for info, f in zip(world.infos, factors, strict=True)}
        self._layout.scale_times(by_place)
        speeds = ", ".join(f"{factor:.2f}" for factor in factors)
        text = f"ranks take {speeds} times what was planned: {text}"
        print_rank_0(world, f"step {progress.step}: {text}")
        loop.mark_outdated()
