"""Benchmarks the user's model on every rank, and prints the results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import torch

from kaitian_mpi.balance.cost_model import RankCost, fit, fit_error, scores
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import Table, show_table
from kaitian_mpi.runtime.polling import NonblockingBarrier, sleeping_barrier, wait_until
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.measure.cache import BenchmarkCache
from kaitian_mpi.train.measure.rank_timer import RankMeasurement, RankTimer, Workload


@dataclass(frozen=True)
class RankBenchmark:
    """The benchmark results of one rank."""

    measured: RankMeasurement
    cost: RankCost
    """The cost model fitted to the measurements, and the memory limit."""
    fit_error: float
    """Root mean square of the cost model's relative errors."""
    from_cache: bool
    """Whether the result comes from an earlier job."""


def benchmark_ranks(workload: Workload) -> list[RankBenchmark]:
    """Time forward, backward and optimizer on all ranks at once, as in training. Collective.

    Takes at most about `--benchmark-seconds`, or no time if all ranks have cached results.

    Args:
        workload: of this rank.

    Returns:
        Every rank's result, by rank.

    Raises:
        AgreedError: not even the smallest batch fits in a rank's memory, or the cache cannot be
            written.
    """
    return list(benchmark_some(workload, range(workload.world.size)).values())


def benchmark_some(workload: Workload, ranks: Collection[int]) -> dict[int, RankBenchmark]:
    """Do as `benchmark_ranks` for some ranks, while the others wait. Collective.

    Args:
        workload: of this rank.
        ranks: those to time: all or none of each host's.

    Returns:
        The timed ranks' results, by rank.
    """
    config, world, min_batch = workload.config, workload.world, workload.min_batch
    is_timed = world.rank in ranks
    cache = BenchmarkCache(workload)
    own = cache.read() if is_timed else None
    # All or none: ranks that share a host must be timed while the others compute as well.
    from_cache = all(gather_values(world.comm, own is not None or not is_timed))
    if not from_cache:
        with torch.random.fork_rng(devices=[]):
            own = _measure(world, RankTimer(workload) if is_timed else None)
        with agree_on_errors(world.comm):
            if own is not None:
                cache.write(own)
    results = gather_values(world.comm, None if own is None else asdict(own))
    return {
        rank: _evaluate(config, RankMeasurement(**result), from_cache, min_batch)
        for rank, result in enumerate(results)
        if result is not None
    }


def scores_of(results: list[RankBenchmark], share: int) -> list[float]:
    """Return the ranks' scores, time_min / time_i, for a share of this many samples."""
    return scores([result.cost.seconds(share) for result in results])


def show_benchmark(
    world: World,
    results: Sequence[RankBenchmark],
    scores: Sequence[float],
    batch_sizes: Sequence[int],
) -> None:
    """Print each rank's cost and batch size, on world rank 0."""
    source = " (from --benchmark-cache)" if results[0].from_cache else ""
    table = Table(f"benchmark{source}: samples per step sum to {sum(batch_sizes)}")
    texts = ("group", "computes in")
    columns = ("rank", "group", "ms: step + sample", "fit", "memory", "computes in", "score")
    for column in (*columns, "samples/step"):
        table.add_column(column, justify="left" if column in texts else "right")
    is_slowed = any(info.slowdown for info in world.infos)
    if is_slowed:
        table.add_column("")
    for rank, result in enumerate(results):
        model, largest = result.cost, result.cost.largest_micro_batch
        row = [
            str(world.infos[rank].world_rank),
            world.infos[rank].kind,
            f"{1e3 * model.alpha_sec:.1f} + {1e3 * model.beta_sec:.2f}",
            f"±{result.fit_error:.0%}",
            "all" if largest is None else str(largest),
            f"{result.measured.precision} {result.measured.memory_format}",
            f"{scores[rank]:.2f}",
            str(batch_sizes[rank]),
        ]
        if is_slowed:
            slowdown = world.infos[rank].slowdown
            row.append(f"slowed {slowdown} (emulated)" if slowdown else "")
        table.add_row(*row)
    show_table(world, table)


def _measure(world: World, timer: RankTimer | None) -> RankMeasurement | None:
    # Ranks may share cores, so each is timed while all others compute too, as in training: a rank
    # that is done keeps computing until the last one is done.
    sleeping_barrier(world.comm)
    with agree_on_errors(world.comm):
        try:
            measured = timer.measure() if timer is not None else None
        finally:
            barrier = NonblockingBarrier(world.comm)
        if timer is None:
            enter_phase("waiting for the benchmark of other ranks", waits=True, limited=False)
            wait_until(barrier.complete)
        else:
            while not barrier.complete():
                timer.keep_busy()
        enter_phase("comparing the benchmarks", waits=True, limited=False)
    return measured


def _evaluate(
    config: TrainingConfig, measured: RankMeasurement, from_cache: bool, min_batch: int
) -> RankBenchmark:
    model = fit(measured.batches, measured.seconds)
    limits = (measured.largest_micro_batch, config.micro_batch_size)
    limit = min((max(limit, min_batch) for limit in limits if limit), default=None)
    error = fit_error(model, measured.batches, measured.seconds)
    cost = RankCost(model.alpha_sec, model.beta_sec, limit)
    return RankBenchmark(measured, cost, error, from_cache)
