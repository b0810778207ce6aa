"""The layouts of a model and its optimizers over the ranks, by name."""

from __future__ import annotations

from collections.abc import Callable

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.layouts.replicate import ReplicateLayout
from kaitian_mpi.train.setup import Setup

# A job loads only the modules of its own layout.


def _find_replicate(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    return ReplicateLayout()


def _find_shard(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    from kaitian_mpi.train.layouts.shard.shard_layout import ShardLayout

    return ShardLayout.find(config, setup, world)


def _find_pipeline(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    from kaitian_mpi.train.layouts.pipeline.pipeline_layout import PipelineLayout

    return PipelineLayout.find(config, setup, world)


def _find_experts(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    from kaitian_mpi.train.layouts.experts.experts_layout import ExpertsLayout

    return ExpertsLayout.find(config, setup, world)


def _find_fastest(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    from kaitian_mpi.train.layouts.choose import choose_layout

    return choose_layout(config, setup, world)


LAYOUTS: dict[str, Callable[[TrainingConfig, Setup, World], Layout]] = {
    "replicate": _find_replicate,
    "shard": _find_shard,
    "pipeline": _find_pipeline,
    "experts": _find_experts,
    "auto": _find_fastest,
}
"""Functions that find a layout for a task, collectively, by the value of `--layout`."""


def find_layout(config: TrainingConfig, setup: Setup, world: World) -> Layout:
    """Return the layout to train in, with what it is planned from. Collective.

    Raises:
        UserError: the task cannot be trained so, or does not fit the ranks' memory.
    """
    return LAYOUTS[config.layout](config, setup, world)
