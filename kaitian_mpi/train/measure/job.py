"""Measures the ranks of a job and the allreduces among its device kinds, for `kaitian-plan`."""

from __future__ import annotations

from dataclasses import replace

from kaitian_mpi.balance.communication import MeasuredAllreduce
from kaitian_mpi.balance.cost_model import scores
from kaitian_mpi.balance.forecast import subsets
from kaitian_mpi.balance.measurements import MeasuredRank, Measurements, plan_job
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.world import World, slowed_as
from kaitian_mpi.observe.console import show_topology
from kaitian_mpi.train.layouts.choose import measure_layouts
from kaitian_mpi.train.measure.allreduce import (
    choose_allreduce,
    gradient_buckets,
    measure_allreduce,
)
from kaitian_mpi.train.measure.plan import find_min_batch
from kaitian_mpi.train.measure.rank_benchmark import benchmark_ranks, is_emulated, show_benchmark
from kaitian_mpi.train.measure.rank_timer import equal_share
from kaitian_mpi.train.setup import MakeTask, prepare_without_folder

_LONG = 10**9


def measure_job(make_task: MakeTask, config: TrainingConfig, world: World) -> Measurements:
    """Benchmark all ranks, and the allreduce among every combination of device kinds. Collective.

    Prints the ranks' costs.
    """
    show_topology(world)
    world = slowed_as(world, config.emulate_slowdown)
    world.device_kind.calls.pause()  # a benchmark has the pace of its steps
    setup = prepare_without_folder(make_task, config, world)
    # The benchmark of a training that is short, or follows the ranks' speed, is shorter.
    config = replace(config, epochs=_LONG, max_steps=0, balance="static")
    min_batch = find_min_batch(config, world, setup)
    results = benchmark_ranks(config, world, setup, min_batch)
    buckets = gradient_buckets(setup.task.model)
    choose_allreduce(config.allreduce, world, buckets)

    def measure_among(kinds: tuple[str, ...]) -> MeasuredAllreduce:
        ranks = [rank for rank, kind in enumerate(world.kinds) if kind in kinds]
        cost = measure_allreduce(config.allreduce, world, ranks, buckets)
        return MeasuredAllreduce({kind: world.kinds.count(kind) for kind in kinds}, cost)

    measured = Measurements(
        model=setup.task.name,
        emulated=is_emulated(world),
        gradient_bytes=sum(buckets),
        global_batch_size=config.global_batch_size,
        ranks=tuple(
            MeasuredRank(info.world_rank, info.host, info.kind, info.device, r.cost, r.fit_error)
            for info, r in zip(world.infos, results, strict=True)
        ),
        allreduces=tuple(map(measure_among, subsets(tuple(dict.fromkeys(world.kinds))))),
        layouts=measure_layouts(config, setup, world)[0],
    )
    share = equal_share(config, world.size)
    by_rank = scores([result.cost.seconds(share) for result in results])
    show_benchmark(world, results, by_rank, plan_job(measured, None).whole.batch_sizes)
    return measured
