"""What `summary.json` says of a run."""

from __future__ import annotations

import time
from typing import Any

import torch

from kaitian_mpi.benchmark.plan import Plan
from kaitian_mpi.elastic.membership import Crew
from kaitian_mpi.engine.evaluation import Evaluation
from kaitian_mpi.engine.state import TrainingState
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.trainer import Trainer


def opening(world: World, state: TrainingState, plan: Plan) -> dict[str, Any]:
    """Return what is known when some ranks begin to train, or go on."""
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
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "torch_version": torch.__version__,
    }


def standing(trainer: Trainer, result: Evaluation) -> dict[str, Any]:
    """Return how the run stands after an epoch."""
    metrics, progress = trainer.metrics, trainer.progress
    steps = max(1, metrics.steps)
    return {
        "steps": progress.step,
        "epochs": progress.epoch,
        "bad_steps": progress.bad_steps,
        "batch_sizes": trainer.sampler.batch_sizes,
        "plans": trainer.balancing.plans,
        "slow_ranks": trainer.balancing.slow_ranks(),
        "samples_per_sec": progress.samples / progress.training_sec,
        "step_time_sec": progress.training_sec / progress.step,
        "compute_time_sec": [seconds / steps for seconds in metrics.compute_sec],
        "wait_time_sec": [seconds / steps for seconds in metrics.wait_sec],
        "training_time_sec": progress.training_sec,
        "val_loss": result.loss,
        "val_accuracy": result.accuracy,
    }


def failures(crew: Crew, earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the losses that the run has lived through, in this job and in those before."""
    return earlier + [
        {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(loss.noticed_at)),
            "ranks": [
                {
                    "rank": info.world_rank,
                    "host": info.host,
                    "device": info.device,
                    "device_kind": info.kind,
                }
                for info in loss.lost
            ],
            "step": loss.step,
            "seconds_to_recover": loss.recovery_sec,
        }
        for loss in crew.losses
    ]
