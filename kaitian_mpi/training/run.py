"""One training run, from a config to a summary; reads top to bottom like a recipe."""

from __future__ import annotations

from typing import Any

import torch

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.mpi.runtime import wait_patiently
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.allreduce import choose_allreduce, gradient_buckets
from kaitian_mpi.training.benchmark import RankBenchmark, benchmark_ranks
from kaitian_mpi.training.computation import Computation
from kaitian_mpi.training.evaluation import Evaluation
from kaitian_mpi.training.loop import Trainer
from kaitian_mpi.training.participation import leave_out, ranks_to_leave_out
from kaitian_mpi.training.planning import (
    Plan,
    is_emulated,
    plan_by_benchmark,
    plan_unmeasured,
    tell_plan,
    write_benchmark,
)
from kaitian_mpi.training.preparation import Ingredients, prepare
from kaitian_mpi.training.report import say, show_topology


def train(config: TrainConfig, world: World) -> dict[str, Any]:
    """Train a model and return the content of `summary.json`. Collective.

    Returns:
        The summary; on a rank that was left out, nothing.

    Raises:
        AgreedError: a rank cannot make what the config asks for; nothing has been trained.
    """
    show_topology(world)
    made = prepare(config, world)
    slowdown = Slowdown(made.slowdowns[world.rank])
    summary: dict[str, Any] = {"emulated": is_emulated(world, made)}
    results = None
    if config.balance != "off":
        results = benchmark_ranks(config, world, made.model, made.data.train, slowdown)
        write_benchmark(world, made, results)
    buckets = gradient_buckets(made.model)
    summary["allreduce"] = choose_allreduce(config.allreduce, world, buckets)

    left_out = _left_out(config, world, results, buckets)
    summary["left_out"] = [
        {"rank": world.infos[rank].world_rank, "why": why} for rank, why in left_out.items()
    ]
    kept = leave_out(world, made, left_out) if left_out else world
    if kept is not None:
        if left_out and results is not None:
            results = [result for rank, result in enumerate(results) if rank not in left_out]
            summary["allreduce"] = choose_allreduce(config.allreduce, kept, buckets)
        _train_on(config, kept, made, results, slowdown, summary)
    if left_out:
        wait_patiently(world.comm)
    return summary


def _left_out(
    config: TrainConfig, world: World, results: list[RankBenchmark] | None, buckets: list[int]
) -> dict[int, str]:
    if results is None or config.keep_all or config.batch_policy == "paper" or world.size == 1:
        return {}
    costs = [result.cost for result in results]
    return ranks_to_leave_out(config, world, costs, buckets)


def _train_on(
    config: TrainConfig,
    world: World,
    made: Ingredients,
    results: list[RankBenchmark] | None,
    slowdown: Slowdown,
    summary: dict[str, Any],
) -> None:
    """Train on the ranks that take part, and keep the summary up to date on disk."""
    if results is None:
        plan = plan_unmeasured(config, world)
    else:
        plan = plan_by_benchmark(config, world, results)
    tell_plan(config, world, made, plan, results)
    computation = Computation(
        world.device, plan.precision, plan.memory_format, config.label_smoothing
    )
    trainer = Trainer(config, world, made, computation, plan, slowdown)
    summary |= _opening(world, made, plan)
    made.folder.write("summary.json", summary)

    for epoch in range(config.epochs):
        if trainer.finished:
            break
        trainer.train_epoch(epoch)
        result = trainer.evaluate()
        say(world, _result_line(epoch, result, trainer))
        made.folder.save_model(trainer.weights())
        summary |= _standing(trainer, result, epochs=epoch + 1)
        made.folder.write("summary.json", summary)

    trainer.close()
    summary["finished"] = True
    made.folder.write("summary.json", summary)
    say(world, f"results in {made.folder.path}")


def _opening(world: World, made: Ingredients, plan: Plan) -> dict[str, Any]:
    names = [info.world_rank for info in world.infos]
    return {
        "finished": False,
        "world_size": world.size,
        "ranks": names,
        "device_kinds": list(dict.fromkeys(world.kinds)),
        "groups": {group.kind: [names[rank] for rank in group.ranks] for group in world.groups},
        "global_batch_size": sum(plan.batch_sizes),
        "batch_sizes": plan.batch_sizes,
        "scores": plan.scores,
        "plans": 1,
        "slow_ranks": [],
        "parameters": sum(p.numel() for p in made.model.parameters()),
        "failures": [],
        "steps": 0,
        "epochs": 0,
        "torch_version": torch.__version__,
    }


def _standing(trainer: Trainer, result: Evaluation, epochs: int) -> dict[str, Any]:
    metrics, progress = trainer.metrics, trainer.progress
    return {
        "steps": progress.step,
        "epochs": epochs,
        "batch_sizes": trainer.sampler.batch_sizes,
        "plans": trainer.balancing.plans,
        "slow_ranks": trainer.balancing.slow_ranks(),
        "samples_per_sec": progress.samples / metrics.training_sec,
        "step_time_sec": metrics.training_sec / progress.step,
        "compute_time_sec": [seconds / progress.step for seconds in metrics.compute_sec],
        "wait_time_sec": [seconds / progress.step for seconds in metrics.wait_sec],
        "training_time_sec": metrics.training_sec,
        "val_loss": result.loss,
        "val_accuracy": result.accuracy,
    }


def _result_line(epoch: int, result: Evaluation, trainer: Trainer) -> str:
    return (
        f"epoch {epoch + 1} done | step {trainer.progress.step} | "
        f"held-out loss {result.loss:.4f} | held-out accuracy {result.accuracy:.4f}"
    )
