"""Choosing how gradients are summed, and what that costs among some ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.communication import AllreduceCost, ddp_buckets, fit_allreduce
from kaitian_mpi.collectives.process_group import KaitianProcessGroup
from kaitian_mpi.collectives.selection import choose_algorithm, time_allreduce
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.waiting import wait_quietly
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.report import say

_SIZES = (64 << 10, 1 << 20)  # and the largest bucket


def gradient_buckets(model: nn.Module) -> list[int]:
    """Return the bytes of DDP's buckets for a model, in the order reduced."""
    count = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return ddp_buckets(count)


def choose_allreduce(request: str, world: World, buckets: Sequence[int]) -> str:
    """Choose how gradients cross device kinds, show it, and return its name. Collective.

    Args:
        request: `--allreduce`.
        world: the ranks of the default process group.
        buckets: bytes that one step reduces.
    """
    group = _group()
    measured = choose_algorithm(group, request, [size // 4 for size in buckets], world.device)
    if group.single_kind:
        say(world, "allreduce: one device kind, no relay")
        return "direct"
    times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in measured.items())
    say(world, f"allreduce: {group.algorithm}" + (f" (measured: {times})" if times else ""))
    return group.algorithm


def measure_allreduce(
    request: str, world: World, ranks: Sequence[int], buckets: Sequence[int]
) -> AllreduceCost:
    """Return what an allreduce costs among some of the ranks. Collective over all of them.

    Args:
        request: `--allreduce`; the fastest algorithm is chosen anew for part of the ranks.
        world: the ranks of the default process group.
        ranks: which of them take part; a single one has nothing to exchange.
        buckets: bytes that one step reduces.
    """
    if len(ranks) == 1 or not buckets:
        return AllreduceCost(0.0, 0.0)
    whole = len(ranks) == world.size
    made = dist.group.WORLD if whole else dist.new_group(list(ranks))
    sizes = sorted({*_SIZES, max(buckets)})
    seconds = None
    if world.rank in ranks:
        assert isinstance(made, KaitianProcessGroup)
        if not whole:
            choose_algorithm(made, request, [size // 4 for size in buckets], world.device)
        seconds = [time_allreduce(made, size // 4, world.device) for size in sizes]
        if not whole:
            dist.destroy_process_group(made)
    wait_quietly(world.comm)  # the others, which have nothing to do
    told = gather_values(world.comm, seconds)
    return fit_allreduce(sizes, next(values for values in told if values is not None))


def _group() -> KaitianProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, KaitianProcessGroup)
    return group
