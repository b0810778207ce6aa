"""Chooses the layout of a script's model, for `--layout auto`: by memory, then by time.

The script's computing is the same in both layouts, and not known before it trains. So they are
compared by what else a step takes: the exchange of gradients and values, and the optimizer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from kaitian_mpi.balance.communication import AllreduceCost, ddp_buckets
from kaitian_mpi.balance.cost_model import fit
from kaitian_mpi.balance.layouts import REPLICATE, SHARD, Prediction, prediction_table
from kaitian_mpi.balance.ownership import BUCKET_CAPS
from kaitian_mpi.balance.pipeline_cost import LayerFacts
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.shard.budget import (
    LayoutSettings,
    ReplicaMemory,
    emulated,
    find_owners,
    replica_memory,
)
from kaitian_mpi.mpi.exchange import gather_values, time_in_rounds
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, show_table
from kaitian_mpi.train.layouts.choose import measure_exchange
from kaitian_mpi.train.measure.rank_timer import memory_limit

_LARGEST, _PART_OF_MEMORY = 8 << 20, 0.01  # of what is exchanged, in bytes
_ROUNDS, _MAX_SEC = 6, 1.0
# How much slower a replica's step must be without computing, which hides a part of the exchange.
_CLEARLY = 1.5
_TENSORS = 32  # small ones, whose number counts


class Costs(NamedTuple):
    """What a step takes besides computing."""

    allreduce_cost: AllreduceCost
    scatter_cost: AllreduceCost
    gather_cost: AllreduceCost
    ranks: list[LayerFacts]
    """The seconds of the optimizer and of copying by rank; nothing of layers."""


def replicates(settings: LayoutSettings, world: World, model: nn.Module, can_shard: bool) -> bool:
    """Return whether a model is replicated: if it fits every rank and is not clearly slower.

    Collective. Prints both layouts, and why one is chosen. `can_shard` says whether its DDP permits
    shards.
    """
    world = emulated(settings, world, model)
    memory = replica_memory(world, model)
    if memory.rank_without is not None:
        _show(world, [_replica(memory), Prediction(SHARD)], memory.text)
        return False
    fractions = _fractions(settings, world, model) if can_shard and world.size > 1 else None
    if fractions is None:
        print_rank_0(world, memory.text)
        return True
    trained = [parameter.nbytes for parameter in model.parameters() if parameter.requires_grad]
    seconds = step_seconds(_measure(world), fractions, len(trained), sum(trained))
    # Other ranks may round otherwise.
    seconds = gather_values(world.comm, seconds)[0]
    predictions = [_replica(memory, seconds[REPLICATE]), Prediction(SHARD, seconds[SHARD])]
    if seconds[REPLICATE] > _CLEARLY * seconds[SHARD]:
        _show(world, predictions, "layout shard: a replica fits every rank, but is slower")
        return False
    _show(world, predictions, f"{memory.text}, and is not clearly slower")
    return True


def step_seconds(
    costs: Costs, fractions: Sequence[float], count: int, size: int
) -> dict[str, float]:
    """Return what a step takes besides computing, by layout.

    Args:
        costs: as measured.
        fractions: the fraction of the model that each rank owns in layout shard.
        count: how many parameters are trained.
        size: their size in bytes.
    """

    def busy(layout: str, parts: Sequence[float]) -> float:
        # A rank has some rows of most large parameters, and few of the small parameters.
        return max(
            rank.update_seconds(part**0.5 * count, part * size)
            + rank.handling_seconds(layout, count, size)
            for rank, part in zip(costs.ranks, parts, strict=True)
        )

    full, rest = divmod(size, BUCKET_CAPS[1])
    buckets = [BUCKET_CAPS[1]] * full + [rest] * (rest > 0)
    sums = sum(map(costs.allreduce_cost.seconds, ddp_buckets(size)))
    exchange = sum(map(costs.scatter_cost.seconds, buckets)) + sum(
        map(costs.gather_cost.seconds, buckets)
    )
    return {
        REPLICATE: sums + busy(REPLICATE, [1.0] * len(costs.ranks)),
        SHARD: exchange + busy(SHARD, fractions),
    }


def _show(world: World, predictions: list[Prediction], line: str) -> None:
    title = "layouts, as predicted, without computing"
    show_table(world, title, prediction_table(predictions), left=("layout", ""))
    print_rank_0(world, line)


def _replica(memory: ReplicaMemory, seconds: float | None = None) -> Prediction:
    needed = () if memory.why else tuple(memory.needed)
    return Prediction(REPLICATE, seconds, needed, memory.why)


def _fractions(settings: LayoutSettings, world: World, model: nn.Module) -> list[float] | None:
    """Return the fractions that ranks would own; None if that does not fit. Collective."""
    try:
        owners = find_owners(settings, world, model, [])
    except AgreedError:
        return None
    fractions = [0.0] * world.size
    for pair in owners.pairs:
        fractions[pair.owner] += pair.fraction
    return fractions


def _measure(world: World) -> Costs:
    """Measure what the layouts are compared by. Collective."""
    memory = min(gather_values(world.comm, memory_limit(world)))
    most = max(1 << 16, min(_LARGEST, int(_PART_OF_MEMORY * memory)))
    scatter, gather = measure_exchange(world, most)
    sizes = most // 16, most
    tensors = {size: torch.zeros(size // 4, device=world.device) for size in sizes}

    def sum_over_ranks(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        world.synchronize()

    works = {size: partial(sum_over_ranks, tensor) for size, tensor in tensors.items()}
    seconds: Mapping[int, float] = time_in_rounds(world.comm, works, _ROUNDS, _MAX_SEC)
    line = fit(sizes, [seconds[size] for size in sizes])
    allreduce = AllreduceCost(line.alpha_sec, line.beta_sec)
    kinds = [info.kind for info in world.infos]
    times = gather_values(world.comm, _own_seconds(world, most))
    ranks = [
        LayerFacts(kind, memory, (), (), **seconds)
        for kind, seconds in zip(kinds, times, strict=True)
    ]
    return Costs(allreduce, scatter, gather, ranks)


def _own_seconds(world: World, size: int) -> dict[str, float]:
    """Return this rank's seconds of the usual optimizer, and of copying."""
    large, other = (torch.zeros(size // 4, device=world.device) for _ in range(2))
    small = [torch.zeros(1, device=world.device) for _ in range(_TENSORS)]

    def median(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            work()
            world.synchronize()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])  # the first one creates state

    def step_of(tensors: list[torch.Tensor]) -> Callable[[], object]:
        parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return AdamW(parameters).step

    per_call = median(lambda: [tensor.copy_(small[0]) for tensor in small]) / _TENSORS
    per_parameter = median(step_of(small)) / _TENSORS
    return {
        "update_sec": per_parameter,
        "update_sec_per_byte": max(0.0, median(step_of([large])) - per_parameter) / size,
        "call_sec": per_call,
        "copy_sec_per_byte": max(0.0, median(lambda: other.copy_(large)) - per_call) / size,
    }
