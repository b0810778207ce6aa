"""Choosing the allreduce algorithm by measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kaitian_mpi.collectives.hybrid import ALGORITHMS
from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from kaitian_mpi.collectives.process_group import KaitianProcessGroup

_REPEATS = 5
_ENOUGH_SEC = 2.0


def choose_algorithm(
    group: KaitianProcessGroup, request: str, sizes: list[int], device: torch.device
) -> dict[str, float]:
    """Set the group's allreduce algorithm; collective.

    Args:
        group: the process group.
        request: an algorithm's name, or `auto` to take the fastest.
        sizes: elements of the float32 buckets that training will reduce.
        device: where they will be.

    Returns:
        Seconds for all buckets by algorithm, the slowest rank's median; empty where nothing had
        to be measured.
    """
    if group.single_kind:
        return {}
    if request != "auto":
        group.algorithm = request
        return {}
    # All algorithms in each round, so that a busy moment of the machine meets them all.
    seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    buckets = [torch.zeros(size, device=device) for size in sizes]
    for _ in _rounds(group):
        for name in ALGORITHMS:
            group.algorithm = name
            dist.barrier(group)
            start = time.perf_counter()
            for bucket in buckets:
                dist.all_reduce(bucket, group=group)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()
            seconds[name].append(time.perf_counter() - start)
    own = [_typical(seconds[name]) for name in ALGORITHMS]
    slowest = [max(times) for times in zip(*gather_values(group.comms.world, own), strict=True)]
    measured = dict(zip(ALGORITHMS, slowest, strict=True))
    group.algorithm = min(measured, key=lambda name: measured[name])
    return measured


def time_allreduce(group: KaitianProcessGroup, size: int, device: torch.device) -> float:
    """Return the seconds of an allreduce of `size` float32 by the group's algorithm; collective.

    The slowest rank's median.
    """
    seconds = []
    tensor = torch.zeros(size, device=device)
    for _ in _rounds(group):
        dist.barrier(group)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        seconds.append(time.perf_counter() - start)
    return max(gather_values(group.comms.world, _typical(seconds)))


def _rounds(group: KaitianProcessGroup) -> Iterator[None]:
    """Go through the rounds of a measurement, fewer where they take long. Collective."""
    began = time.perf_counter()
    for _ in range(1 + _REPEATS):
        yield
        # The same on every rank, or some would wait for others in a further round.
        if max(gather_values(group.comms.world, time.perf_counter() - began)) > _ENOUGH_SEC:
            return


def _typical(seconds: list[float]) -> float:
    """Return the median of the rounds; the first warms up, and counts if it is the only one."""
    return statistics.median(seconds[1:] or seconds)
