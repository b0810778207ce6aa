"""Chooses the allreduce algorithm by measurement, and measures its cost among some ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.communication import AllreduceCost, ddp_buckets, fit_allreduce
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.network.residual import Residuals
from kaitian_mpi.distributed.sums import sum_gradients
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.polling import sleeping_barrier

if TYPE_CHECKING:
    # Importing it starts MPI, and a script imports this module before MPI's settings are made.
    from kaitian_mpi.distributed.process_group import KaitianProcessGroup

_WARM_UP_ELEMENTS = 1 << 16  # in each lane: as many as a link between hosts needs to be measured
_REPEATS = 5
_MAX_SEC = 2.0


def choose_algorithm(
    group: KaitianProcessGroup,
    request: str,
    sizes: list[int],
    device: torch.device,
    wire: str = "fp32",
) -> dict[str, float]:
    """Set the group's allreduce algorithm. Collective.

    Args:
        group: the process group.
        request: an algorithm's name, or `auto` for the fastest; also if there is none of that name
            on these ranks, as one by host after the loss of a host.
        sizes: elements of the float32 buckets that training will reduce.
        device: the buckets' device.
        wire: gradient format between hosts.

    Returns:
        Seconds for all buckets, by algorithm: the slowest rank's median. Empty if nothing had to
        be measured.
    """
    if group.has_one_group:
        return {}
    names = group.algorithms
    if request in names:
        group.algorithm = request
        return {}
    short = min(max(sizes, default=0), _WARM_UP_ELEMENTS * group.comms.lanes)
    _warm_up(group, names, _Bucket(short, device, wire))
    # All algorithms in each round, so that a temporary load affects all of them.
    seconds: dict[str, list[float]] = {name: [] for name in names}
    buckets = [_Bucket(size, device, wire) for size in sizes]
    for _ in _rounds(group):
        for name in names:
            group.algorithm = name
            dist.barrier(group)
            start = time.perf_counter()
            for bucket in buckets:
                bucket.sum(group)
            _synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    own = [_typical(seconds[name]) for name in names]
    slowest = [max(times) for times in zip(*gather_values(group.comms.world, own), strict=True)]
    measured = dict(zip(names, slowest, strict=True))
    group.algorithm = min(measured, key=lambda name: measured[name])
    return measured


def _warm_up(group: KaitianProcessGroup, names: Sequence[str], bucket: _Bucket) -> None:
    """Let each algorithm do what it does only once, such as connecting. Collective.

    That may take seconds, in which the time for the measurement itself would be over.
    """
    for name in names:
        group.algorithm = name
        bucket.sum(group)


def time_allreduce(
    group: KaitianProcessGroup, size: int, device: torch.device, wire: str = "fp32"
) -> float:
    """Time an allreduce of `size` float32 gradients with the group's algorithm. Collective.

    Returns:
        The slowest rank's median, in seconds.
    """
    seconds = []
    bucket = _Bucket(size, device, wire)
    for _ in _rounds(group):
        dist.barrier(group)
        start = time.perf_counter()
        bucket.sum(group)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return max(gather_values(group.comms.world, _typical(seconds)))


class _Bucket:
    """A bucket of gradients as training sums them."""

    def __init__(self, size: int, device: torch.device, wire: str) -> None:
        self._values = torch.zeros(size, device=device)
        self._residual = Residuals(wire).add(self._values, {"all": slice(0, size)})

    def sum(self, group: KaitianProcessGroup) -> None:
        sum_gradients(self._values, self._residual, group)


def _rounds(group: KaitianProcessGroup) -> Iterator[None]:
    """Yield once per round of a measurement, with fewer rounds if they take long. Collective."""
    began = time.perf_counter()
    for _ in range(1 + _REPEATS):
        yield
        # The same decision on every rank; otherwise some would wait for others in another round.
        if max(gather_values(group.comms.world, time.perf_counter() - began)) > _MAX_SEC:
            return


def _synchronize(device: torch.device) -> None:
    device_of(device).synchronize(device.index or 0)


def _typical(seconds: list[float]) -> float:
    """Return the median without the first round, which warms up, unless it is the only one."""
    return statistics.median(seconds[1:] or seconds)


_SIZES = (64 << 10, 1 << 20)  # bytes; the largest bucket is added


def gradient_buckets(model: nn.Module) -> list[int]:
    """Return the bytes of DDP's buckets for a model, in the order reduced."""
    count = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return ddp_buckets(count)


@dataclass(frozen=True)
class AllreduceChoice:
    """The algorithm that reduces gradients across device kinds."""

    algorithm: str
    """Its name; `direct` with a single group."""
    seconds: Mapping[str, float]
    """Seconds for all buckets of a step, by algorithm; empty if nothing had to be measured."""


def choose_allreduce(request: str, world: World, buckets: Sequence[int]) -> AllreduceChoice:
    """Choose and log the algorithm that reduces gradients across device kinds. Collective.

    Args:
        request: `--allreduce`.
        world: the ranks of the default process group.
        buckets: bytes of the buckets that a step reduces.
    """
    group = _group()
    sizes = [size // 4 for size in buckets]
    measured = choose_algorithm(group, request, sizes, world.device, world.relay.wire)
    crosses = group.measure_links()
    if (wire := world.relay.wire) != "fp32":
        print_rank_0(
            world,
            f"wire: gradients cross between hosts as {wire}"
            if crosses
            else f"wire: {wire} has no effect, as no gradient crosses between hosts in host memory",
        )
    if group.has_one_group:
        is_all = world.size == world.started
        there = "there is only one device kind" if is_all else "the ranks here are of one kind"
        print_rank_0(world, f"allreduce: direct, as {there}")
        return AllreduceChoice("direct", {})
    times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in measured.items())
    print_rank_0(
        world, f"allreduce: {group.algorithm}" + (f" (measured: {times})" if times else "")
    )
    return AllreduceChoice(group.algorithm, measured)


def measure_allreduce(
    request: str, world: World, ranks: Sequence[int], buckets: Sequence[int]
) -> AllreduceCost:
    """Measure the cost of an allreduce among some of the ranks. Collective over all ranks.

    Args:
        request: `--allreduce`; with `auto`, the algorithm is chosen again for a subset of ranks.
        world: the ranks of the default process group.
        ranks: the ranks that take part; for a single one the cost is 0.
        buckets: bytes of the buckets that a step reduces.
    """
    if len(ranks) == 1 or not buckets:
        return AllreduceCost(0.0, 0.0)
    is_world = len(ranks) == world.size
    group = dist.group.WORLD if is_world else dist.new_group(list(ranks))
    sizes = sorted({*_SIZES, max(buckets)})
    seconds = None
    if world.rank in ranks:
        measured = cast("KaitianProcessGroup", group)
        if not is_world:
            of_step = [size // 4 for size in buckets]
            choose_algorithm(measured, request, of_step, world.device, world.relay.wire)
        seconds = [
            time_allreduce(measured, size // 4, world.device, world.relay.wire) for size in sizes
        ]
        if not is_world:
            dist.destroy_process_group(group)
    sleeping_barrier(world.comm)  # ranks that take no part wait here without spinning
    gathered = gather_values(world.comm, seconds)
    return fit_allreduce(sizes, next(values for values in gathered if values is not None))


def _group() -> KaitianProcessGroup:
    return cast("KaitianProcessGroup", dist.group.WORLD)
