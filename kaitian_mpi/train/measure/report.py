"""The `kaitian-bench` report: measures ranks and allreduces, and forecasts throughput."""

from __future__ import annotations

from pathlib import Path

from kaitian_mpi.balance.bench_file import Bench, BenchRank, bench_to_json
from kaitian_mpi.balance.communication import MeasuredAllreduce, ddp_buckets
from kaitian_mpi.balance.forecast import (
    SubsetForecasts,
    forecast_subsets,
    format_rate,
    scale_cohorts,
    subsets,
)
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.devices.emulation import Slowdown, describe_slowdown
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import make_table, print_rank_0, show_table, show_topology
from kaitian_mpi.observe.files import save_json
from kaitian_mpi.train.measure.allreduce import (
    choose_allreduce,
    gradient_buckets,
    measure_allreduce,
)
from kaitian_mpi.train.measure.min_batch import find_min_batch
from kaitian_mpi.train.measure.plan import equal_share, is_emulated
from kaitian_mpi.train.measure.rank_benchmark import (
    RankBenchmark,
    benchmark_ranks,
    scores_of,
    show_benchmark,
)
from kaitian_mpi.train.measure.rank_timer import Workload
from kaitian_mpi.train.setup import MakeTask, Setup, prepare_without_folder

_EXAMPLE_RANKS = 8


def bench(make_task: MakeTask, config: TrainingConfig, world: World, target: Path | None) -> Bench:
    """Benchmark all ranks and every combination of device kinds, and print the results. Collective.

    Args:
        make_task: makes what is benchmarked.
        config: the benchmark's settings.
        world: the ranks of the default process group.
        target: the file for `kaitian-plan`, written by world rank 0; None for none.

    Raises:
        AgreedError: a rank cannot load the model or data, or the file cannot be written.
    """
    show_topology(world)
    world.script_slowdown.pause()  # a benchmark slows down each of its steps itself
    setup = prepare_without_folder(make_task, config, world)
    slowdown = Slowdown(setup.slowdowns[world.rank])
    min_batch = find_min_batch(config, world, setup)
    results = benchmark_ranks(Workload(config, world, setup, slowdown, min_batch))
    buckets = gradient_buckets(setup.task.model)
    choose_allreduce(config.allreduce, world, buckets)
    found = Bench(
        model=setup.task.name,
        emulated=is_emulated(world, setup),
        gradient_bytes=sum(buckets),
        global_batch_size=config.global_batch_size,
        ranks=tuple(
            BenchRank(info.world_rank, info.host, info.kind, info.device, r.cost, r.fit_error)
            for info, r in zip(world.infos, results, strict=True)
        ),
        measured=tuple(_measure_subsets(config, world, buckets)),
    )
    forecasts = forecast_subsets(found.cohorts(), found.global_batch_size, buckets, found.measured)
    _show_ranks(config, world, setup, results, forecasts)
    _show_allreduce(world, found)
    _show_forecasts(world, found, forecasts)
    with agree_on_errors(world.comm):
        if target is not None and world.rank == 0:
            save_json(target, bench_to_json(found, {"forecasts": _to_json(forecasts)}))
            print_rank_0(world, f"written to {target}; {advice(target, found)}")
    return found


def advice(target: Path, found: Bench) -> str:
    """Return advice on using the file: a command that works, or what to measure for one.

    Args:
        target: the file.
        found: its contents.
    """
    kind = found.ranks[0].kind
    try:
        cohorts = scale_cohorts(found.cohorts(), {kind: _EXAMPLE_RANKS})
        buckets = ddp_buckets(found.gradient_bytes)
        forecast_subsets(cohorts, found.global_batch_size, buckets, found.measured)
    except UserError:
        return "to forecast a larger job with kaitian-plan, measure two ranks of each kind"
    return f"try kaitian-plan {target} --world {_EXAMPLE_RANKS}x{kind}"


def _measure_subsets(
    config: TrainingConfig, world: World, buckets: list[int]
) -> list[MeasuredAllreduce]:
    measured = []
    for kinds in subsets(tuple(dict.fromkeys(world.kinds))):
        ranks = [rank for rank, kind in enumerate(world.kinds) if kind in kinds]
        counts = {kind: world.kinds.count(kind) for kind in kinds}
        cost = measure_allreduce(config.allreduce, world, ranks, buckets)
        measured.append(MeasuredAllreduce(counts, cost))
    return measured


def _show_ranks(
    config: TrainingConfig,
    world: World,
    setup: Setup,
    results: list[RankBenchmark],
    forecasts: SubsetForecasts,
) -> None:
    scores = scores_of(results, equal_share(config, world.size))
    slowed = [describe_slowdown(setup.slowdowns[info.world_rank]) for info in world.infos]
    show_benchmark(world, results, scores, forecasts.whole.batch_sizes, slowed)


def _show_allreduce(world: World, found: Bench) -> None:
    table = make_table("allreduce of all gradients" + _emulated(found))
    for column in ("groups", "ranks", "latency us", "GB/s", "gradients ms"):
        table.add_column(column, justify="left" if column == "groups" else "right")
    for entry in found.measured:
        cost = entry.cost
        rate = f"{1e-9 / cost.sec_per_byte:.2f}" if cost.sec_per_byte else "-"
        table.add_row(
            " + ".join(entry.ranks_per_kind),
            str(sum(entry.ranks_per_kind.values())),
            f"{1e6 * cost.latency_sec:.0f}" if cost.latency_sec >= 1e-6 else "<1",
            rate,
            f"{1e3 * cost.seconds(found.gradient_bytes):.1f}",
        )
    show_table(world, table)


def _show_forecasts(world: World, found: Bench, forecasts: SubsetForecasts) -> None:
    table = make_table(f"forecast at {found.global_batch_size} samples per step" + _emulated(found))
    for column in (
        "groups",
        "samples/s",
        "step ms",
        "efficiency",
        "samples per step",
        "bottleneck",
    ):
        numbers = ("samples/s", "step ms", "efficiency")
        table.add_column(column, justify="right" if column in numbers else "left")
    for kinds, cast in forecasts.forecasts.items():
        table.add_row(
            " + ".join(kinds),
            format_rate(cast.samples_per_sec),
            f"{1e3 * cast.step_sec:.1f}",
            f"{cast.efficiency:.0%}",
            _shortened(cast.batch_sizes),
            cast.bottleneck,
        )
    show_table(world, table)
    for kind in forecasts.kinds:
        print_rank_0(world, forecasts.worth(kind))
    for note in forecasts.notes:
        print_rank_0(world, f"note: {note}")


def _shortened(batch_sizes: list[int]) -> str:
    if len(batch_sizes) <= 8:
        return ", ".join(map(str, batch_sizes))
    return f"{min(batch_sizes)} to {max(batch_sizes)}"


def _emulated(found: Bench) -> str:
    return " (emulated)" if found.emulated else ""


def _to_json(forecasts: SubsetForecasts) -> list[dict[str, object]]:
    return [
        {
            "kinds": list(kinds),
            "batch_sizes": cast.batch_sizes,
            "step_sec": cast.step_sec,
            "samples_per_sec": cast.samples_per_sec,
            "efficiency": cast.efficiency,
            "bottleneck": cast.bottleneck,
        }
        for kinds, cast in forecasts.forecasts.items()
    ]
