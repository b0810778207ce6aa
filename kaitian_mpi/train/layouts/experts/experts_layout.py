"""Layout experts: the dense part on every rank, each expert on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.experts import without_experts
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.engine import Engine
from kaitian_mpi.train.layouts.divided_step import check_parts
from kaitian_mpi.train.layouts.experts.chunk_trial import ChunkTrial
from kaitian_mpi.train.layouts.experts.engine import ExpertsEngine
from kaitian_mpi.train.layouts.experts.expert_owners import (
    ExpertOwners,
    check_experts,
    experts_of,
    find_mixtures,
)
from kaitian_mpi.train.layouts.experts.measure import (
    ExpertFacts,
    ExpertsPlan,
    find_facts,
)
from kaitian_mpi.train.layouts.experts.moves import ExpertMoves, TokenCounts
from kaitian_mpi.train.layouts.experts.show import show_placement
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.moving import move_own
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan, Profile, Profiles, find_profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import StepObserver
from kaitian_mpi.train.task import Computation


class ExpertsLayout(Layout):
    """Each expert is on one rank, and perhaps a mirror, by speed and memory; all else on every one.

    The tokens of all ranks are sent to the ranks of their experts.
    """

    name = "experts"
    engine = ExpertsEngine
    divides_samples = False  # a rank's time is also that of other ranks' tokens
    waits_within = "ranks waiting for tokens"
    equal_shares = "as planned with the experts"

    def __init__(self, facts: ExpertFacts) -> None:
        """Plan rows and experts from these facts, and from what training shows."""
        self.facts = facts
        self._profiles = Profiles({})
        self.is_calibrated = False
        """Whether the first steps have been compared with what was planned."""
        self._tokens = TokenCounts(())
        self._predicted_sec: float | None = None

    @classmethod
    def find(cls, config: TrainingConfig, setup: Setup, world: World) -> ExpertsLayout:
        """Return the layout for a task, by its experts. Collective.

        Raises:
            UserError: the task cannot be trained so, or an expert does not fit a rank's memory.
        """
        with agree_on_errors(world.comm):
            check_parts(setup.task, "experts")
            check_experts(setup.task.model, find_mixtures(setup.task.model))
        return cls(find_facts(config, setup, world, takes_alike=config.balance == "off"))

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
        self, config: TrainingConfig, world: World, setup: Setup, earlier: Mapping[str, Profile]
    ) -> Profiles:
        with without_experts():
            return find_profiles(config, world, setup, earlier, part="all but experts")

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

    def plan(self, config: TrainingConfig, world: World, profiles: Profiles) -> ExpertsPlan:
        self._profiles = profiles
        return self.facts.plan(config, world, profiles)

    def assign(self, config: TrainingConfig, world: World, state: State, plan: Plan) -> None:
        owners = state.partition
        assert isinstance(owners, ExpertOwners)
        assert isinstance(plan, ExpertsPlan)
        placement = plan.placement
        owners.assign_experts(world, placement.owners, placement.mirrors)
        show_placement(world, plan, self.facts)
        self.facts = self.facts.placed(world, placement)
        self._predicted_sec = placement.step_sec if plan.is_measured else None

    def planned_bytes(
        self, config: TrainingConfig, world: World, plan: Plan, profiles: Profiles
    ) -> list[int | None]:
        assert isinstance(plan, ExpertsPlan)
        return [*self.facts.planned_bytes(world, plan.placement)]

    def observers(self, config: TrainingConfig, loop: Loop) -> Iterable[StepObserver]:
        mixtures = list(find_mixtures(loop.state.model).values())
        self._tokens = TokenCounts(mixtures)
        yield self._tokens
        if loop.world.size == 1:
            return
        trial = self._begin_trial(config, loop)
        yield trial
        if config.balance != "off":
            yield ExpertMoves(config, loop, mixtures, trial, self._profiles, self)

    def _begin_trial(self, config: TrainingConfig, loop: Loop) -> ChunkTrial:
        """Return a trial of numbers of chunks, which is over at once if the number is known."""
        assert isinstance(loop.engine, ExpertsEngine)
        dispatcher = loop.engine.exchange.dispatcher
        progress = loop.progress
        if self.facts.chunks:
            dispatcher.set_chunks(self.facts.chunks)
        is_known = config.expert_chunks != "auto" or self.facts.chunks > 0
        steps_left = 0 if is_known else progress.total_steps - progress.step
        return ChunkTrial(loop.world, dispatcher, steps_left, self._keep_chunks)

    def _keep_chunks(self, chunks: int) -> None:
        self.facts = replace(self.facts, chunks=chunks)

    def follow(self, facts: ExpertFacts, step_sec: float) -> None:
        """Plan by these facts, by which a step as it is now takes so long. Not collective."""
        self.facts = facts
        self.is_calibrated = True
        self._predicted_sec = step_sec

    def describe(self, engine: Engine) -> dict[str, Any]:
        assert isinstance(engine, ExpertsEngine)
        dispatcher = engine.exchange.dispatcher
        times = gather_values(engine.world.comm, (dispatcher.waited_sec, dispatcher.total_sec))
        hidden = [1 - min(1.0, waited / total) if total else None for waited, total in times]
        fields = super().describe(engine)
        fields["experts"] |= {
            "predicted_step_sec": self._predicted_sec,
            "token_fractions": self._tokens.fractions(),
            "hidden_by_rank": hidden,
        }
        return fields
