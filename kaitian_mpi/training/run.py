"""One training run, from a config to a summary; reads top to bottom like a recipe."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.collectives.process_group import KaitianProcessGroup
from kaitian_mpi.collectives.selection import choose_algorithm
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.computation import Computation
from kaitian_mpi.training.evaluation import Evaluation
from kaitian_mpi.training.loop import Trainer
from kaitian_mpi.training.planning import Plan, is_emulated, make_plan
from kaitian_mpi.training.preparation import Ingredients, prepare
from kaitian_mpi.training.report import say, show_topology

# DDP's own bucket size: what one allreduce of training carries at most.
_BUCKET_ELEMENTS = (25 << 20) // 4


def train(config: TrainConfig, world: World) -> dict[str, Any]:
    """Train a model and return the content of `summary.json`. Collective.

    Raises:
        AgreedError: a rank cannot make what the config asks for; nothing has been trained.
    """
    show_topology(world)
    made = prepare(config, world)
    slowdown = Slowdown(made.slowdowns[world.rank])
    plan = make_plan(config, world, made, slowdown)
    allreduce = choose_allreduce(config, world, made)
    computation = Computation(
        world.device, config.precision, plan.memory_format, config.label_smoothing
    )
    trainer = Trainer(config, world, made, computation, plan.batch_sizes, slowdown)
    summary = _opening(world, made, plan, allreduce)
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

    summary["finished"] = True
    made.folder.write("summary.json", summary)
    say(world, f"results in {made.folder.path}")
    return summary


def choose_allreduce(config: TrainConfig, world: World, made: Ingredients) -> str:
    """Choose how gradients cross device kinds, show it, and return its name. Collective."""
    group = dist.group.WORLD
    assert isinstance(group, KaitianProcessGroup)
    left = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    sizes = [min(_BUCKET_ELEMENTS, left - done) for done in range(0, left, _BUCKET_ELEMENTS)]
    measured = choose_algorithm(group, config.allreduce, sizes, world.device)
    if group.single_kind:
        say(world, "allreduce: one device kind, no relay")
        return "direct"
    times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in measured.items())
    say(world, f"allreduce: {group.algorithm}" + (f" (measured: {times})" if times else ""))
    return group.algorithm


def _opening(world: World, made: Ingredients, plan: Plan, allreduce: str) -> dict[str, Any]:
    return {
        "finished": False,
        "emulated": is_emulated(world, made),
        "world_size": world.size,
        "device_kinds": list(dict.fromkeys(world.kinds)),
        "groups": {group.kind: list(group.ranks) for group in world.groups},
        "global_batch_size": sum(plan.batch_sizes),
        "batch_sizes": plan.batch_sizes,
        "scores": plan.scores,
        "plans": 1,
        "allreduce": allreduce,
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
