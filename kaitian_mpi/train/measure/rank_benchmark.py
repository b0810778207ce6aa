"""Benchmarks the user's model on every rank, and shows and writes the results."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

import torch

from kaitian_mpi.balance.cost_model import scores
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import show_table
from kaitian_mpi.runtime.polling import sleeping_barrier, wait_until
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.measure.cache import BenchmarkCache
from kaitian_mpi.train.measure.rank_timer import RankMeasurement, RankTimer, Workload
from kaitian_mpi.train.setup import Setup

_FILE = "benchmark.json"


def benchmark_ranks(
    workload: Workload, ranks: Collection[int] | None = None
) -> dict[int, RankMeasurement]:
    """Time forward, backward and optimizer on all ranks at once, as in training. Collective.

    Takes at most about `--benchmark-seconds`, or no time if all ranks have cached results.

    Returns:
        The timed ranks' results, by rank.
    """
    world = workload.world
    is_timed = ranks is None or world.rank in ranks
    cache = BenchmarkCache(workload)
    own = cache.read() if is_timed else None
    # All or none: ranks that share a host must be timed while the others compute as well.
    if not all(gather_values(world.comm, own is not None or not is_timed)):
        with torch.random.fork_rng(devices=[]):
            own = _measure(world, RankTimer(workload) if is_timed else None)
        with agree_on_errors(world.comm):
            if own is not None:
                cache.write(own)
    results = gather_values(world.comm, None if own is None else asdict(own))
    return {
        rank: RankMeasurement(**result) for rank, result in enumerate(results) if result is not None
    }


def _measure(world: World, timer: RankTimer | None) -> RankMeasurement | None:
    # Ranks may share cores, so each is timed while all others compute too, as in training: a rank
    # that is done keeps computing until the last one is done.
    sleeping_barrier(world.comm)
    with agree_on_errors(world.comm):
        try:
            measured = timer.measure() if timer is not None else None
        finally:
            barrier = world.comm.Ibarrier()
        if timer is None:
            enter_phase("waiting for the benchmark of other ranks", waits=True, limited=False)
            wait_until(barrier.Test)
        else:
            while not barrier.Test():
                timer.keep_busy()
        enter_phase("comparing the benchmarks", waits=True, limited=False)
    return measured


def show_benchmark(
    world: World,
    results: Sequence[RankMeasurement],
    scores: Sequence[float],
    batch_sizes: Sequence[int],
) -> None:
    """Print each rank's cost and batch size, on world rank 0."""
    source = " (from --benchmark-cache)" if results[0].from_cache else ""
    columns = ["rank", "group", "ms: step + sample", "fit", "memory", "computes in", "score"]
    is_slowed = any(info.slowdown for info in world.infos)
    rows = [[*columns, "samples/step", *([""] if is_slowed else [])]]
    for info, result, score, share in zip(world.infos, results, scores, batch_sizes, strict=True):
        cost = result.cost
        row = [
            str(info.world_rank),
            info.kind,
            f"{1e3 * cost.alpha_sec:.1f} + {1e3 * cost.beta_sec:.2f}",
            f"±{result.fit_error:.0%}",
            str(cost.largest_micro_batch or "all"),
            f"{result.precision} {result.memory_format}",
            f"{score:.2f}",
            str(share),
        ]
        if is_slowed:
            row.append(f"slowed {info.slowdown} (emulated)" if info.slowdown else "")
        rows.append(row)
    title = f"benchmark{source}: samples per step sum to {sum(batch_sizes)}"
    show_table(world, title, rows, left=("group", "computes in", ""))


def write_benchmark(world: World, setup: Setup, results: Sequence[RankMeasurement]) -> None:
    """Write benchmark.json: what was measured on each rank."""
    share = math.ceil(sum(result.batches[-1] for result in results) / len(results))
    by_rank = scores([result.cost.seconds(share) for result in results])
    ranks = [
        {
            "rank": info.world_rank,
            "host": info.host,
            "device_kind": info.kind,
            "device": info.device,
            "alpha_sec": result.cost.alpha_sec,
            "beta_sec_per_sample": result.cost.beta_sec,
            "fit_error": result.fit_error,
            "largest_micro_batch": result.largest_micro_batch,
            "seconds_by_batch": dict(zip(result.batches, result.seconds, strict=True)),
            "from_cache": result.from_cache,
            "memory_bytes": info.memory_bytes,
            "memory_format": result.memory_format,
            "precision": result.precision,
            "score": score,
            "emulated_slowdown": info.slowdown,
        }
        for info, result, score in zip(world.infos, results, by_rank, strict=True)
    ]
    setup.folder.write(_FILE, {"ranks": ranks, "emulated": is_emulated(world)})


def record_allreduce(setup: Setup, seconds: Mapping[str, float]) -> None:
    """Add the measured algorithms to benchmark.json: seconds for a step's buckets, by algorithm."""
    if seconds:
        setup.folder.write(_FILE, {**setup.folder.read(_FILE), "allreduce_sec": dict(seconds)})


def is_emulated(world: World) -> bool:
    """Return whether any device kind or slowdown of the run is emulated."""
    return any(info.emulated or info.slowdown for info in world.infos)
