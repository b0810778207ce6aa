"""The effects of a changed flag when a run is resumed: one table, pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from kaitian_mpi.config import TrainingConfig, flag_name


class Invalidated(Enum):
    """A result of the earlier job that a changed flag invalidates."""

    COSTS = "the ranks are benchmarked again"
    EXCLUSION = "which ranks are excluded"
    PLAN = "the batch sizes"
    ALLREDUCE = "the allreduce algorithm"


# Any other changed flag applies from the resumed step on, which is reported in one line.
REJECTED = frozenset({"task", "model", "dataset", "val_split", "optimizer", "seed"})
"""It would be another run: a one-line error, exit code 2."""
SILENT = frozenset(
    {
        "config",  # the settings in it are compared themselves
        "data_dir",  # the files may have moved; the data themselves are compared
        *("devices", "device_map", "share_device", "network_interface"),  # like mpirun's hosts
        *("emulate_kinds", "emulate_slowdown", "parity"),
        *("resume", "snapshots", "run_dir", "export"),
        *("progress", "quiet", "timeline", "timeline_every", "profile"),
        *("tensorboard", "wandb", "mlflow"),
    }
)
"""It determines how the job runs, not what it trains: it applies without a message."""

# Other costs make another plan, and other ranks may be worth their communication.
_COSTS = frozenset({Invalidated.COSTS, Invalidated.EXCLUSION, Invalidated.PLAN})
_PLAN = frozenset({Invalidated.EXCLUSION, Invalidated.PLAN})
_ALLREDUCE = frozenset({Invalidated.ALLREDUCE, Invalidated.EXCLUSION})
INVALIDATES: Mapping[str, frozenset[Invalidated]] = {
    # A setting of the task may be a learning rate to continue with, or change what a step costs; if
    # it makes another model or dataset, loading the checkpoint shows that.
    **dict.fromkeys(("set", "micro_batch_size", "precision", "memory_format", "sync_bn"), _COSTS),
    **dict.fromkeys(("global_batch_size", "batch_policy", "batch_size"), _PLAN),
    **dict.fromkeys(("balance", "keep_all", "spares"), _PLAN),
    **dict.fromkeys(("allreduce", "network_allreduce", "wire"), _ALLREDUCE),
    **dict.fromkeys(("relay_dtype", "group_by"), _ALLREDUCE),
}
"""The results of the earlier job that have to be determined again."""


@dataclass(frozen=True)
class Changes:
    """The differences between this job's flags and those of the job that wrote the checkpoint."""

    rejected: str = ""
    """Why this job cannot resume the run; empty if it can."""
    lines: tuple[str, ...] = ()
    """Lines to log, one per changed flag."""
    invalidated: frozenset[Invalidated] = frozenset()
    """Results that have to be determined again."""


def compare_flags(then: Mapping[str, Any], now: TrainingConfig, ranks_are_known: bool) -> Changes:
    """Return the changed flags and their consequences.

    Args:
        then: the checkpoint's settings by name; one that it lacks is newer than the checkpoint and
            counts as unchanged.
        now: this job's settings.
        ranks_are_known: whether the earlier job has benchmarked all ranks of this one.
    """
    changed = {
        name: (then[name], value)
        for name, value in asdict(now).items()
        if name in then and then[name] != value
    }
    for name, (before, value) in changed.items():
        if name in REJECTED:
            return Changes(
                f"{flag_name(name)} is {value!r}, but the checkpoint was made with {before!r}; "
                "give the same, or another --run-dir"
            )
    invalidated = frozenset().union(*(INVALIDATES.get(name, frozenset()) for name in changed))
    benchmarks = now.balance != "off" and (not ranks_are_known or Invalidated.COSTS in invalidated)
    lines = tuple(
        _line(name, before, value, now, benchmarks)
        for name, (before, value) in changed.items()
        if name not in SILENT
    )
    return Changes("", lines, invalidated)


def _line(name: str, before: Any, value: Any, now: TrainingConfig, benchmarks: bool) -> str:
    line = f"{flag_name(name)} changed from {before!r} to {value!r}"
    if reason := _without_effect(name, now, benchmarks):
        return f"{line}, which is ignored: {reason}"
    again = Invalidated.COSTS in INVALIDATES.get(name, ()) and now.balance != "off"
    return f"{line}; {Invalidated.COSTS.value}" if again else line


def _without_effect(name: str, now: TrainingConfig, benchmarks: bool) -> str:
    """Return why a flag's new value has no effect in this job; empty if it may have one."""
    if name == "init":
        return "the checkpoint has the weights"
    if name in ("benchmark_seconds", "benchmark_cache") and not benchmarks:
        reason = "--balance off needs none" if now.balance == "off" else "all ranks have been"
        return f"no rank is benchmarked; {reason}"
    if name == "batch_size" and now.batch_policy != "paper":
        return "it is used with --batch-policy paper only"
    if name == "global_batch_size" and now.batch_policy == "paper":
        return "it is used with --batch-policy global only"
    return ""
