"""The fields of `summary.json`, how they are filled in, and how the file is read.

Imports neither torch nor MPI, because `kaitian-supervise` reads the file too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from kaitian_mpi.mpi.topology import RankInfo
    from kaitian_mpi.train.membership import RankLoss

NAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The state of a run; None if not known yet. Per-rank lists are in the order of `ranks`."""

    finished: bool = False
    """Written last: the only reliable sign of success."""
    emulated: bool | None = None
    """Whether any device kind or slowdown is emulated."""
    excluded: list[dict[str, Any]] | None = None
    """The ranks without which the job is faster: `rank` and `reason` of each."""
    allreduce: str | None = None
    """The algorithm that sums gradients across groups, or did before a loss left a single one.

    `direct` if there was never more than one.
    """
    relay: dict[str, Any] | None = None
    """The transport of tensors between groups; None with a single one."""
    wire: str | None = None
    """The gradient format between hosts."""
    pipeline: dict[str, Any] | None = None
    """The stages of layout pipeline, what was predicted of them, and each rank's memory."""
    experts: dict[str, Any] | None = None
    """The experts of layout experts by rank, and what was predicted of them.

    Since these ranks began: `token_fractions`, by expert its part of the tokens of its mixture; and
    `hidden_by_rank`, the part of the time in which tokens travel that the rank did not wait for."""
    parity: bool | None = None
    """Whether all kinds of devices computed alike before training; not known if not compared."""
    failures: list[dict[str, Any]] | None = None
    """The losses of ranks that the run has survived, in this job and earlier ones."""

    world_size: int | None = None
    ranks: list[int] | None = None
    """The world ranks that train."""
    device_kinds: list[str] | None = None
    groups: dict[str, list[int]] | None = None
    """The world ranks of each device kind."""
    global_batch_size: int | None = None
    batch_sizes: list[int] | None = None
    """Samples per step of each rank."""
    scores: list[float] | None = None
    """Each rank's score, time_min / time_i."""
    parameters: int | None = None
    memory: list[dict[str, Any]] | None = None
    """Of each rank's device, unless all ranks have all of the state: `limit_bytes`; the most that
    it was to use, `planned_bytes`; and has used since these ranks began, `peak_bytes`."""
    torch_version: str | None = None

    checkpoint_fault: str | None = None
    """Why the last checkpoint could not be written; None if it was."""
    steps: int | None = None
    epochs: int | None = None
    bad_steps: int | None = None
    """Steps that were skipped because their gradient was not finite."""
    plans: int | None = None
    """The number of plans since these ranks started to train."""
    slow_ranks: list[dict[str, Any]] | None = None
    """Slow periods of ranks since these ranks started to train: begin, end and cause."""
    samples_per_sec: float | None = None
    """Over the run's steps that were timed, as is the next; None if none was."""
    step_time_sec: float | None = None
    compute_time_sec: list[float] | None = None
    """Mean per step, by rank."""
    wait_time_sec: list[float] | None = None
    """Mean per step, by rank."""
    training_time_sec: float | None = None
    validation: dict[str, Any] | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the known fields as the content of the file."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Summary:
        """Return a file's content as a summary; values of a wrong type are ignored."""
        types = get_type_hints(cls)
        if isinstance(means := content.get("validation"), dict):  # JSON has null for NaN
            means = {name: math.nan if mean is None else mean for name, mean in means.items()}
            content = {**content, "validation": means}
        names = [field.name for field in fields(cls) if field.name in content]
        return cls(**{name: content[name] for name in names if _fits(content[name], types[name])})


def describe_rank(info: RankInfo) -> dict[str, Any]:
    """Return where a rank is."""
    where = {"host": info.host, "device": info.device, "device_kind": info.kind}
    return {"rank": info.world_rank, **where}


def describe_losses(losses: Sequence[RankLoss]) -> list[dict[str, Any]]:
    """Return losses as entries of `failures`."""
    return [
        {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(loss.noticed_at)),
            "ranks": [describe_rank(info) for info in loss.lost],
            "step": loss.step,
            "seconds_to_recover": loss.recovery_sec,
        }
        for loss in losses
    ]


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON has a field's type; only the outermost type is checked."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (origin or hint)
