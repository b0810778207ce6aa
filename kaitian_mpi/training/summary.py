"""What `summary.json` says of a run: its fields, where their values come from, and how it is read.

Loads neither torch nor MPI: `kaitian-supervise` reads the file too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from kaitian_mpi.benchmark.plan import Plan
    from kaitian_mpi.elastic.membership import Loss
    from kaitian_mpi.engine.evaluation import Evaluation
    from kaitian_mpi.engine.state import TrainingState
    from kaitian_mpi.mpi.world import World
    from kaitian_mpi.training.follow_up import StepFollowUp
    from kaitian_mpi.training.trainer import Trainer

NAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run stands; None where nothing is known yet. Per-rank lists are ordered as `ranks`."""

    finished: bool = False
    """Written last: the only sign of success that counts."""
    emulated: bool | None = None
    """Whether any device kind or slowdown is emulated."""
    left_out: list[dict[str, Any]] | None = None
    """The ranks that the job is faster without, and why."""
    allreduce: str | None = None
    """How gradients cross device kinds; `direct` where there is one kind."""
    failures: list[dict[str, Any]] | None = None
    """The losses that the run has survived, in this job and in those before."""

    world_size: int | None = None
    """How many ranks train."""
    ranks: list[int] | None = None
    """These ranks, by their numbers in MPI's world."""
    device_kinds: list[str] | None = None
    groups: dict[str, list[int]] | None = None
    """The ranks of each device kind."""
    global_batch_size: int | None = None
    batch_sizes: list[int] | None = None
    """Samples per step of each rank."""
    scores: list[float] | None = None
    """Of each rank, time_min / time_i."""
    parameters: int | None = None
    """Of the model."""
    torch_version: str | None = None

    steps: int | None = None
    epochs: int | None = None
    bad_steps: int | None = None
    """Steps that were skipped: their gradient was not finite."""
    plans: int | None = None
    """How many plans there were since these ranks train."""
    slow_ranks: list[dict[str, Any]] | None = None
    """Which ranks were slow since these ranks train, from when to when, and why."""
    samples_per_sec: float | None = None
    step_time_sec: float | None = None
    compute_time_sec: list[float] | None = None
    """Mean per step of each rank."""
    wait_time_sec: list[float] | None = None
    """Mean per step of each rank."""
    training_time_sec: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is known as the content of the file."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Summary:
        """Return what a file says; a value of another type than the field's is ignored."""
        types = get_type_hints(cls)
        names = [field.name for field in fields(cls) if field.name in content]
        return cls(**{name: content[name] for name in names if _fits(content[name], types[name])})

    def with_ranks(self, world: World, state: TrainingState, plan: Plan, allreduce: str) -> Summary:
        """Return this with what is known when some ranks begin to train."""
        names = [info.world_rank for info in world.infos]
        return replace(
            self,
            finished=False,
            allreduce=allreduce,
            world_size=world.size,
            ranks=names,
            device_kinds=list(dict.fromkeys(world.kinds)),
            groups={group.kind: [names[rank] for rank in group.ranks] for group in world.groups},
            global_batch_size=sum(plan.batch_sizes),
            batch_sizes=plan.batch_sizes,
            scores=plan.scores,
            parameters=sum(p.numel() for p in state.model.parameters()),
            torch_version=world.info.torch_version,
        )

    def with_epoch(self, trainer: Trainer, follow_up: StepFollowUp, result: Evaluation) -> Summary:
        """Return this with how the run stands after an epoch."""
        metrics, progress = follow_up.metrics, trainer.progress
        steps = max(1, metrics.steps)
        return replace(
            self,
            steps=progress.step,
            epochs=progress.epoch,
            bad_steps=progress.bad_steps,
            batch_sizes=trainer.sampler.batch_sizes,
            plans=follow_up.balancing.plans,
            slow_ranks=follow_up.balancing.slow_ranks(),
            samples_per_sec=progress.samples / progress.training_sec,
            step_time_sec=progress.training_sec / progress.step,
            compute_time_sec=[seconds / steps for seconds in metrics.compute_sec],
            wait_time_sec=[seconds / steps for seconds in metrics.wait_sec],
            training_time_sec=progress.training_sec,
            val_loss=result.loss,
            val_accuracy=result.accuracy,
        )


def describe_losses(losses: Sequence[Loss]) -> list[dict[str, Any]]:
    """Return losses as `failures` lists them."""
    return [
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
        for loss in losses
    ]


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON is of a field's type, as far as its outermost type says."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (origin or hint)
