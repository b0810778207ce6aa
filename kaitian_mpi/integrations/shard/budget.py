"""How a script's model is laid out on the ranks, by their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.optim import AdamW, Optimizer

from kaitian_mpi.balance.ownership import Pair
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.integrations.shard.host_parameters import as_plain, on_host
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World, limited_as
from kaitian_mpi.train.layouts.shard.memory_budget import (
    USUAL_STATES,
    MemoryBudget,
    divide_memory,
    memory_in_use,
)
from kaitian_mpi.train.measure.rank_timer import memory_limit

_SETTINGS = TrainingConfig(layout="shard", mirrors=False)
_MIN_ACTIVATIONS = 0.1  # of a rank's memory, which is left to what a forward keeps


@dataclass(frozen=True)
class LayoutSettings:
    """What the command was asked for."""

    layout: str = "shard"
    """`shard`; or `auto`, which is replicate for models of which a replica fits each rank, if that
    is not clearly slower."""
    shards_parameters: bool = False
    """Whether to shard parameters even if they fit whole on each rank."""
    emulate_memory: str = ""
    """Limits of ranks' memory, as `--emulate-memory` takes them."""


@dataclass(frozen=True)
class Owners:
    """Who owns what of a model; the same on every rank."""

    pairs: list[Pair]
    sharded: frozenset[int]
    """The numbers of the parameters of which the owners alone have the values."""
    prefetches: bool
    """Whether each rank has memory for values that come while it computes."""
    text: str
    """Says it in a line."""


def find_owners(
    settings: LayoutSettings, world: World, model: nn.Module, optimizers: Sequence[Optimizer]
) -> Owners:
    """Choose the owners of a model that is whole on each rank. Collective.

    Raises:
        AgreedError: it does not fit.
    """
    budget = _budget(settings, world, model, optimizers)
    pairs, _ = budget.owners(_SETTINGS, world)
    owned = [0.0] * world.size
    for pair in pairs:
        owned[pair.owner] += pair.fraction
    prefetches = budget.can_overlap(pairs, world)
    return Owners(pairs, budget.sharded, prefetches, budget.describe_owners(owned))


def emulated(settings: LayoutSettings, world: World, model: nn.Module) -> World:
    """Return the world with emulated limits, which hold from the next `unlimited()` on. Collective.

    The interpreter's memory and the data do not count, but the model does.
    """
    model_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    model_bytes -= _missing(model)
    return limited_as(world, settings.emulate_memory, model_bytes)


def _budget(
    settings: LayoutSettings, world: World, model: nn.Module, optimizers: Sequence[Optimizer]
) -> MemoryBudget:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The usual optimizer, if the script makes its own later.
    expected_optimizers = optimizers or [AdamW(trained)]
    planned = nn.ParameterList(map(as_plain, model.parameters()))
    return divide_memory(
        _SETTINGS,
        world,
        planned,
        expected_optimizers,
        _used(world, model),
        settings.shards_parameters,
    )


class ReplicaMemory(NamedTuple):
    """Whether each rank has memory for a replica; the same on every rank."""

    needed: list[int]
    """The bytes that each rank needs."""
    rank_without: int | None
    """The rank that lacks the most; None if it fits every rank."""
    why: str
    """What that rank lacks."""
    text: str
    """Says it in a line."""


def replica_memory(world: World, model: nn.Module) -> ReplicaMemory:
    """Return whether each rank has memory for a replica. Collective."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    # Gradients, the buckets in which DDP sums them, and the optimizer's state.
    needed_here = int(_used(world, model) + trained * (2 + USUAL_STATES))
    facts = gather_values(world.comm, [needed_here, memory_limit(world) * (1 - _MIN_ACTIVATIONS)])
    needed = [bytes_needed for bytes_needed, _ in facts]
    short = [rank for rank, (bytes_needed, limit) in enumerate(facts) if bytes_needed > limit]
    if not short:
        return ReplicaMemory(needed, None, "", "layout replicate: a replica fits every rank")
    worst = max(short, key=lambda rank: facts[rank][0] - facts[rank][1])
    needs, has = (f"{size / 1e6:,.0f} MB" for size in facts[worst])
    why = f"needs {needs} on rank {worst}, which has {has}"
    return ReplicaMemory(
        needed,
        worst,
        why,
        f"layout shard: a replica takes about {needs}, and rank {worst} has {has} for it",
    )


def _used(world: World, model: nn.Module) -> int:
    """Return the bytes of this rank's device that the whole model and the rest take."""
    if world.info.emulated_memory:
        return sum(parameter.nbytes for parameter in model.parameters())
    return memory_in_use(world) + _missing(model)


def _missing(model: nn.Module) -> int:
    """Return the bytes of parameters that are not on this rank's device yet."""
    return sum(holder.missing_bytes(parameter) for _, parameter, holder in on_host(model))
