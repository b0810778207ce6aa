"""A run's metadata in its checkpoints, and what a job that resumes it may still use of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.config import TrainingConfig, flag_name
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.observe.tensor_files import TensorFile
from kaitian_mpi.train.measure.plan import Profile
from kaitian_mpi.train.summary import Summary


@dataclass(frozen=True)
class RunMetadata:
    """Plain values that are saved with the state. For a rank's place see `RankInfo.place`."""

    config: dict[str, Any]
    profiles: dict[str, Profile]
    """The ranks' profiles, by place."""
    excluded_places: list[str]
    allreduce_algorithm: str
    active_places: list[str]
    batch_sizes: list[int]
    failures: list[dict[str, Any]]
    """The losses that the run has survived, as in `summary.json`."""
    dataset_size: str

    def to_json(self) -> dict[str, Any]:
        """Convert to values that JSON can hold."""
        profiles = {
            place: {**vars(profile), "cost": profile.cost and vars(profile.cost)}
            for place, profile in self.profiles.items()
        }
        return {**vars(self), "profiles": profiles}

    @staticmethod
    def from_json(content: dict[str, Any]) -> RunMetadata:
        profiles = {
            place: Profile(**{**profile, "cost": cost and RankCost(**cost)})
            for place, profile in content["profiles"].items()
            for cost in [profile["cost"]]
        }
        return RunMetadata(**{**content, "profiles": profiles})


@dataclass(frozen=True)
class EarlierJob:
    """The results and checkpoint of an earlier job of the run, if any."""

    metadata: RunMetadata | None = None
    """The metadata of its last checkpoint, the same on every rank; None if there is none."""
    progress: dict[str, Any] = field(default_factory=dict)
    """The fields of `Progress`; the same on every rank."""
    file: TensorFile | None = None
    """Holds the checkpoint's state, on the one rank that has read it, until it is restored."""
    name: str = ""
    """The checkpoint's file and host, for messages."""
    invalidated: frozenset[Invalidated] = frozenset()
    """Results of the earlier job that this one has to determine again."""
    summary: Summary = field(default_factory=Summary)
    """Its summary up to that checkpoint."""
    is_finished: bool = False

    def remembered(self, part: Invalidated) -> RunMetadata | None:
        """Return the earlier job's metadata, if its result for `part` is still valid."""
        return None if part in self.invalidated else self.metadata


class Invalidated(Enum):
    """A result of the earlier job that a changed flag invalidates."""

    COSTS = auto()
    EXCLUSION = auto()
    PLAN = auto()
    ALLREDUCE = auto()


# Any other changed flag applies from the resumed step on, which is reported in one line.
REJECTED = frozenset({"task", "model", "dataset", "val_split", "optimizer", "seed"})
"""Flags that would make it another run: a one-line error, exit code 2."""
SILENT = frozenset(
    {
        "config",  # the settings in it are compared themselves
        "data_dir",  # the files may have moved; the data themselves are compared
        "init",  # the checkpoint has the weights
        *("devices", "share_device", "network_interface"),  # like mpirun's hosts
        *("emulate_kinds", "emulate_slowdown", "emulate_memory", "parity"),
        *("resume", "snapshots", "run_dir", "export"),
        *("progress", "quiet", "timeline", "timeline_every"),
        *("tensorboard", "wandb", "mlflow"),
    }
)
"""Flags for how the job runs, not for what it trains: they apply without a message."""

# Other costs make another plan, and other ranks may be worth their communication.
_COSTS = frozenset({Invalidated.COSTS, Invalidated.EXCLUSION, Invalidated.PLAN})
_PLAN = frozenset({Invalidated.EXCLUSION, Invalidated.PLAN})
_ALLREDUCE = frozenset({Invalidated.ALLREDUCE, Invalidated.EXCLUSION})
INVALIDATES: Mapping[str, frozenset[Invalidated]] = {
    # A setting of the task may be a learning rate to continue with, or change what a step costs; if
    # it makes another model or dataset, loading the checkpoint shows that.
    **dict.fromkeys(("set", "micro_batch_size", "precision", "memory_format", "sync_bn"), _COSTS),
    "layout": _COSTS,  # with or without the experts
    **dict.fromkeys(("global_batch_size", "batch_policy", "batch_size"), _PLAN),
    **dict.fromkeys(("balance", "keep_all", "spares"), _PLAN),
    **dict.fromkeys(("allreduce", "network_allreduce", "wire"), _ALLREDUCE),
    **dict.fromkeys(("relay_dtype", "group_by", "vendor_library"), _ALLREDUCE),
}
"""The results of the earlier job that have to be determined again."""


def compare_flags(
    then: Mapping[str, Any], now: TrainingConfig
) -> tuple[list[str], frozenset[Invalidated]]:
    """Return a line for each changed flag, and the results that are to be determined again.

    A setting that the checkpoint lacks is newer than it, and counts as unchanged. Raises an
    `AgreedError` if this job cannot resume the run.
    """
    changed = {
        name: f"changed from {then[name]!r} to {value!r}"
        for name, value in asdict(now).items()
        if name in then and then[name] != value
    }
    for name in changed:
        if name in REJECTED:
            raise AgreedError(
                f"{flag_name(name)} is {getattr(now, name)!r}, but the checkpoint was made with "
                f"{then[name]!r}; give the same, or another --run-dir"
            )
    invalidated = frozenset().union(*(INVALIDATES.get(name, frozenset()) for name in changed))
    lines = [f"{flag_name(name)} {text}" for name, text in changed.items() if name not in SILENT]
    return lines, invalidated
