"""Chooses the allreduce algorithm by measurement, and measures its cost among some ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.communication import FREE, AllreduceCost, ddp_buckets
from kaitian_mpi.balance.cost_model import fit
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.gradients import sum_gradients
from kaitian_mpi.distributed.residual import Residuals
from kaitian_mpi.mpi.exchange import gather_values, time_in_rounds
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.polling import sleeping_barrier

if TYPE_CHECKING:
    # Importing it starts MPI, and a script imports this module before MPI's settings are made.
    from kaitian_mpi.distributed.process_group import KaitianProcessGroup

_SIZES = (64 << 10, 1 << 20)  # bytes; the largest bucket is added
_WARM_UP_ELEMENTS = 1 << 16  # in each lane: as many as a link between hosts needs to be measured
_REPEATS = 5
_MAX_SEC = 2.0


def gradient_buckets(model: nn.Module) -> list[int]:
    """Return the bytes of DDP's buckets for a model, in the order reduced."""
    count = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return ddp_buckets(count)


def choose_algorithm(
    group: KaitianProcessGroup,
    request: str,
    sizes: list[int],
    device: torch.device,
    wire: str = "fp32",
) -> dict[str, float]:
    """Set the group's allreduce algorithm: the one of that name, or else the fastest. Collective.

    Returns the slowest rank's median seconds for float32 buckets of so many elements, by algorithm;
    nothing if nothing had to be measured.
    """
    if group.has_one_group:
        return {}
    names = group.host.algorithms
    if request in names:
        group.host.use_algorithm(request)
        return {}
    # Each does what it does only once, such as connecting: that may take seconds.
    short = min(max(sizes, default=0), _WARM_UP_ELEMENTS * group.comms.lanes)
    _time(group, names, [short], device, wire, repeats=0)
    measured = _time(group, names, sizes, device, wire)
    group.host.use_algorithm(min(measured, key=lambda name: measured[name]))
    return measured


def _time(
    group: KaitianProcessGroup,
    names: Sequence[str],
    sizes: Sequence[int],
    device: torch.device,
    wire: str,
    repeats: int = _REPEATS,
) -> dict[str, float]:
    """Time buckets of float32 gradients by each algorithm, as training sums them. Collective.

    Returns:
        The slowest rank's median in seconds, by algorithm.
    """
    buckets = [torch.zeros(size, device=device) for size in sizes]
    residuals = [Residuals(wire).add(bucket, {"all": slice(0, len(bucket))}) for bucket in buckets]

    def sum_by(name: str) -> None:
        group.host.use_algorithm(name)
        for bucket, residual in zip(buckets, residuals, strict=True):
            sum_gradients(bucket, residual, group)
        device_of(device).synchronize(device.index or 0)

    works = {name: partial(sum_by, name) for name in names}
    return time_in_rounds(group.comms.world, works, 1 + repeats, _MAX_SEC)


def choose_allreduce(
    request: str, world: World, buckets: Sequence[int]
) -> tuple[str, dict[str, float]]:
    """Choose and log the algorithm that reduces gradients across device kinds. Collective.

    Returns its name, `direct` with a single group, and what `choose_algorithm` measures. Buckets
    are in bytes.
    """
    group = cast("KaitianProcessGroup", dist.group.WORLD)
    wire = world.communication.wire
    measured = choose_algorithm(group, request, [n // 4 for n in buckets], world.device, wire)
    crosses = group.measure_links()
    if wire != "fp32":
        if crosses:
            effect = f"gradients cross between hosts as {wire}"
        else:
            effect = f"{wire} has no effect, as no gradient crosses between hosts in host memory"
        print_rank_0(world, f"wire: {effect}")
    if group.has_one_group:
        is_all = world.size == world.started
        there = "there is only one device kind" if is_all else "the ranks here are of one kind"
        print_rank_0(world, f"allreduce: direct, as {there}")
        return "direct", {}
    times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in measured.items())
    shown = f" (measured: {times})" if times else ""
    print_rank_0(world, f"allreduce: {group.host.algorithm}{shown}")
    return group.host.algorithm, measured


def measure_allreduce(
    request: str, world: World, ranks: Sequence[int], buckets: Sequence[int]
) -> AllreduceCost:
    """Measure the cost of an allreduce among some of the ranks. Collective over all ranks."""
    if len(ranks) == 1 or not buckets:
        return FREE
    is_world = len(ranks) == world.size
    device = world.device
    wire = world.communication.wire
    group = cast("Any", dist.group.WORLD if is_world else dist.new_group(list(ranks)))
    sizes = sorted({*_SIZES, max(buckets)})
    seconds = None
    if world.rank in ranks:
        if not is_world:
            choose_algorithm(group, request, [size // 4 for size in buckets], device, wire)
        name = group.host.algorithm
        seconds = [_time(group, [name], [size // 4], device, wire)[name] for size in sizes]
        if not is_world:
            dist.destroy_process_group(group)
    sleeping_barrier(world.comm)  # ranks that take no part wait here without spinning
    gathered = gather_values(world.comm, seconds)
    line = fit(sizes, next(values for values in gathered if values is not None))
    return AllreduceCost(line.alpha_sec, line.beta_sec)
