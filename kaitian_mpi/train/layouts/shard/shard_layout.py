"""Layout shard: divides a model's state over the ranks, by their memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.sharded_model import ShardedModel
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.train.layouts.divided_step import check_parts
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.shard.engine import ShardEngine
from kaitian_mpi.train.layouts.shard.memory_budget import MemoryBudget, find_memory_budget
from kaitian_mpi.train.layouts.shard.row_states import Key
from kaitian_mpi.train.layouts.shard.shards import Shards, divide_parameters, steps_by_element
from kaitian_mpi.train.measure.plan import Plan, Profile, Profiles, find_profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Computation, Task


class ShardLayout(Layout):
    """Each rank has a part of the gradients and optimizer state, and of parameters if need be."""

    name = "shard"
    engine = ShardEngine

    def __init__(self, budget: MemoryBudget, reserved: int) -> None:
        """Divide a model by the ranks' budget; `reserved` bytes of it are this rank's."""
        self._budget = budget
        self._reserved = reserved
        self._sharded_model: ShardedModel | None = None
        # Of the sharded parameters, what this rank has before there are owners.
        self._values: dict[Key, torch.Tensor] = {}

    @classmethod
    def find(cls, config: TrainingConfig, setup: Setup, world: World) -> ShardLayout:
        """Return the layout for a task, by the ranks' memory. Collective.

        Raises:
            AgreedError: it does not fit.
        """
        return cls(*find_memory_budget(setup, config, world))

    def place(self, config: TrainingConfig, setup: Setup, world: World) -> Setup:
        budget = self._budget
        model = setup.task.model
        if not budget.sharded:
            model.to(world.device)
            return setup
        sharded_model = ShardedModel(model, budget.sharded, world.device)
        parameters = list(model.parameters())
        pairs, _ = budget.owners(config, world)
        by_rows = steps_by_element(setup.task.make_optimizers(model))
        parts = divide_parameters(
            parameters, range(len(parameters)), budget.sharded, pairs, by_rows
        )
        rank_parts = [part for part in parts if world.rank in (part.owner, part.mirror)]
        self._values = sharded_model.shard(
            [(part.parameter, part.begin, part.end) for part in rank_parts]
        )
        self._sharded_model = sharded_model
        return replace(setup, trial_values=sharded_model.with_random_values)

    def find_profiles(
        self, config: TrainingConfig, world: World, setup: Setup, earlier: Mapping[str, Profile]
    ) -> Profiles:
        return find_profiles(config, world, setup, earlier, self._reserved)

    def make_state(
        self, config: TrainingConfig, setup: Setup, computation: Computation, total_steps: int
    ) -> State:
        sharded_model = self._sharded_model
        values = self._values
        check_can_shard(setup.task)
        with nullcontext() if sharded_model is None else sharded_model.making_optimizers():
            return State(
                setup.task,
                computation,
                total_steps,
                config.wire,
                moves=sharded_model is None,
                make_partition=partial(Shards, sharded_model=sharded_model, values=values),
            )

    def assign(self, config: TrainingConfig, world: World, state: State, plan: Plan) -> None:
        budget = self._budget
        shards = state.partition
        assert isinstance(shards, Shards)
        pairs, why = budget.owners(config, world)
        overlaps = budget.can_overlap(pairs, world)
        if not overlaps:  # memory is short
            world.device_kind.return_large_blocks()
        shards.assign(world, pairs, overlaps=overlaps)
        self._values = {}
        print_rank_0(world, budget.describe(*shards.held(world.size), why))

    def planned_bytes(
        self, config: TrainingConfig, world: World, plan: Plan, profiles: Profiles
    ) -> list[int | None]:
        stepping = self._budget.optimizer_bytes(config, world)
        return profiles.planned_bytes(world.infos, plan.batch_sizes, stepping)


def check_can_shard(task: Task) -> None:
    """Check that a task can be trained in layout shard. Not collective.

    Raises:
        UserError: the task cannot be trained so.
    """
    check_parts(task, "shard")
    if any(getattr(module, "max_norm", None) is not None for module in task.model.modules()):
        raise UserError(
            "--layout shard: an embedding with max_norm changes only those rows that a rank's own "
            "samples use; leave that out, or limit the norms of all rows between two steps"
        )
