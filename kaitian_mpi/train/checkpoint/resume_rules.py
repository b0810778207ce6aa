"""What happens when a run is resumed with a changed flag: one table, pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from kaitian_mpi.config import TrainingConfig, flag_name


class OnChange(Enum):
    """How a changed flag is treated."""

    REJECTED = "rejected"
    """It would be another run: a one-line error, exit code 2."""
    APPLIES = "applies"
    """It applies from the resumed step on, which is reported in one line."""
    APPLIES_SILENTLY = "applies silently"
    """It determines how the job runs, not what it trains: it applies without a message."""


class Invalidated(Enum):
    """A result of the earlier job that a changed flag invalidates."""

    COSTS = "the ranks are benchmarked again"
    EXCLUSION = "which ranks are excluded"
    PLAN = "the batch sizes"
    ALLREDUCE = "the allreduce algorithm"


@dataclass(frozen=True)
class Rule:
    """How a changed flag is treated, and what it invalidates."""

    on_change: OnChange
    invalidates: frozenset[Invalidated] = frozenset()


def _applies(*invalidates: Invalidated) -> Rule:
    return Rule(OnChange.APPLIES, frozenset(invalidates))


_REJECTED = Rule(OnChange.REJECTED)
_APPLIES_SILENTLY = Rule(OnChange.APPLIES_SILENTLY)
_APPLIES = _applies()
# Other costs make another plan, and other ranks may be worth their communication.
_NEW_COSTS = _applies(Invalidated.COSTS, Invalidated.EXCLUSION, Invalidated.PLAN)
_NEW_PLAN = _applies(Invalidated.EXCLUSION, Invalidated.PLAN)

RULES: Mapping[str, Rule] = {
    "config": _APPLIES_SILENTLY,  # what it sets is compared by itself
    "task": _REJECTED,
    # It may be a learning rate to continue with, or what a step costs; where it is another model
    # or dataset, that shows when the checkpoint is loaded.
    "set": _NEW_COSTS,
    "model": _REJECTED,
    "dataset": _REJECTED,
    "data_dir": _APPLIES_SILENTLY,  # the files may have moved; the data themselves are compared
    "val_split": _REJECTED,
    "augment": _APPLIES,
    "init": _APPLIES,
    "workers": _APPLIES,
    "global_batch_size": _NEW_PLAN,
    "batch_policy": _NEW_PLAN,
    "batch_size": _NEW_PLAN,
    "balance": _NEW_PLAN,
    "benchmark_seconds": _APPLIES,
    "benchmark_cache": _APPLIES,
    "micro_batch_size": _NEW_COSTS,
    "keep_all": _NEW_PLAN,
    "allreduce": _applies(Invalidated.ALLREDUCE, Invalidated.EXCLUSION),
    "network_allreduce": _applies(Invalidated.ALLREDUCE, Invalidated.EXCLUSION),
    "wire": _applies(Invalidated.ALLREDUCE, Invalidated.EXCLUSION),
    "relay_dtype": _applies(Invalidated.ALLREDUCE, Invalidated.EXCLUSION),
    "relay_memory_mb": _APPLIES,
    "devices": _APPLIES_SILENTLY,  # like mpirun's hosts and number of ranks
    "device_map": _APPLIES_SILENTLY,
    "share_device": _APPLIES_SILENTLY,
    "group_by": _applies(Invalidated.ALLREDUCE, Invalidated.EXCLUSION),
    "network_interface": _APPLIES_SILENTLY,
    "emulate_kinds": _APPLIES_SILENTLY,
    "emulate_slowdown": _APPLIES_SILENTLY,
    "parity": _APPLIES_SILENTLY,
    "epochs": _APPLIES,
    "max_steps": _APPLIES,
    "optimizer": _REJECTED,  # the other one's state in the checkpoint would be of no use
    "lr": _APPLIES,
    "momentum": _APPLIES,
    "nesterov": _APPLIES,
    "weight_decay": _APPLIES,
    "clip_norm": _APPLIES,
    "label_smoothing": _APPLIES,
    "schedule": _APPLIES,
    "warmup": _APPLIES,
    "precision": _NEW_COSTS,
    "memory_format": _NEW_COSTS,
    "sync_bn": _NEW_COSTS,
    "max_bad_steps": _APPLIES,
    "check_every": _APPLIES,
    "resume": _APPLIES_SILENTLY,
    "checkpoint_every": _APPLIES,
    "checkpoint_minutes": _APPLIES,
    "checkpoint_copy_mb": _APPLIES,
    "keep_checkpoints": _APPLIES,
    "spares": _NEW_PLAN,
    "step_timeout": _APPLIES,
    "snapshots": _APPLIES_SILENTLY,
    "snapshot_every": _APPLIES,
    "seed": _REJECTED,
    "run_dir": _APPLIES_SILENTLY,
    "export": _APPLIES_SILENTLY,
    "progress": _APPLIES_SILENTLY,
    "quiet": _APPLIES_SILENTLY,
    "timeline": _APPLIES_SILENTLY,
    "timeline_every": _APPLIES_SILENTLY,
    "profile": _APPLIES_SILENTLY,
    "log_interval": _APPLIES,
    "tensorboard": _APPLIES_SILENTLY,
    "wandb": _APPLIES_SILENTLY,
    "mlflow": _APPLIES_SILENTLY,
    "log_level": _APPLIES,
}


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
        if RULES[name].on_change is OnChange.REJECTED:
            return Changes(
                f"{flag_name(name)}: found {value!r}, needed {before!r}, with which the "
                "checkpoint was made; give the same, or another --run-dir"
            )
    invalidated = frozenset().union(*(RULES[name].invalidates for name in changed))
    benchmarks = now.balance != "off" and (not ranks_are_known or Invalidated.COSTS in invalidated)
    lines = tuple(
        _line(name, before, value, now, benchmarks)
        for name, (before, value) in changed.items()
        if RULES[name].on_change is OnChange.APPLIES
    )
    return Changes("", lines, invalidated)


def _line(name: str, before: Any, value: Any, now: TrainingConfig, benchmarks: bool) -> str:
    if reason := _without_effect(name, now, benchmarks):
        return f"{flag_name(name)} changed from {before!r} to {value!r}, which is ignored: {reason}"
    again = Invalidated.COSTS in RULES[name].invalidates and now.balance != "off"
    note = f"; {Invalidated.COSTS.value}" if again else ""
    return f"{flag_name(name)} changed from {before!r} to {value!r}{note}"


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
