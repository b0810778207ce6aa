"""From the benchmark to the plan: how many samples each rank takes per step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.planner import plan_batches_as_paper, plan_equal, plan_fastest
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.benchmark import RankBenchmark, benchmark_ranks, scores_of
from kaitian_mpi.training.computation import MEMORY_FORMATS
from kaitian_mpi.training.preparation import Ingredients
from kaitian_mpi.training.report import say, show_benchmark


@dataclass(frozen=True)
class Plan:
    """The ranks' batch sizes, and how this rank lays images out in memory."""

    batch_sizes: list[int]
    scores: list[float]
    memory_format: str


def make_plan(config: TrainConfig, world: World, made: Ingredients, slowdown: Slowdown) -> Plan:
    """Benchmark the ranks where asked to, and share the batch. Collective."""
    if config.balance == "off":
        plan = _equal_plan(config, world)
    else:
        results = benchmark_ranks(
            config, world, made.model, made.data.train, _equal_share(config, world), slowdown
        )
        plan = _plan_by_benchmark(config, world, results)
        show_benchmark(world, results, plan.scores, plan.batch_sizes, made.slowdowns)
        _write_benchmark(world, made, results, plan)
    made.folder.append(
        "plan.jsonl",
        {"step": 0, "batch_sizes": plan.batch_sizes, "why": f"--balance {config.balance}"},
    )
    return plan


def _equal_share(config: TrainConfig, world: World) -> int:
    if config.batch_policy == "paper":
        return config.batch_size
    return math.ceil(config.global_batch_size / world.size)


def _equal_plan(config: TrainConfig, world: World) -> Plan:
    scores = [1.0] * world.size
    named = config.memory_format
    # Not measured; convolutions are faster so on every device we have met.
    memory_format = "channels_last" if named == "auto" else named
    assert memory_format in MEMORY_FORMATS
    plan = Plan(_share(config, scores), scores, memory_format)
    say(world, f"balance off: samples per step and rank {plan.batch_sizes}")
    return plan


def _plan_by_benchmark(config: TrainConfig, world: World, results: list[RankBenchmark]) -> Plan:
    scores = scores_of(results)
    shares = _share(config, scores, [result.cost for result in results])
    return Plan(shares, scores, results[world.rank].memory_format)


def _share(
    config: TrainConfig, scores: list[float], costs: list[CostModel] | None = None
) -> list[int]:
    if config.batch_policy == "paper":
        return plan_batches_as_paper(scores, config.batch_size)
    if costs is None:  # not measured
        return plan_equal(len(scores), config.global_batch_size)
    return plan_fastest(costs, config.global_batch_size)


def _write_benchmark(
    world: World, made: Ingredients, results: list[RankBenchmark], plan: Plan
) -> None:
    ranks = [
        {
            "rank": rank,
            "device_kind": world.infos[rank].kind,
            "alpha_sec": result.cost.alpha_sec,
            "beta_sec_per_sample": result.cost.beta_sec,
            "memory_bytes": world.infos[rank].memory_bytes,
            "memory_format": result.memory_format,
            "score": plan.scores[rank],
            "emulated_slowdown": made.slowdowns[rank],
        }
        for rank, result in enumerate(results)
    ]
    made.folder.write("benchmark.json", {"ranks": ranks, "emulated": is_emulated(world, made)})


def is_emulated(world: World, made: Ingredients) -> bool:
    """Return whether any device kind or slowdown of the run is emulated."""
    return any(info.emulated for info in world.infos) or any(f > 1 for f in made.slowdowns)
