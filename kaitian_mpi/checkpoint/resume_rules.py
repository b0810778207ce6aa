"""What a flag whose value changed does when a run is resumed. Pure: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from kaitian_mpi.config import TrainConfig, flag_name


class OnChange(Enum):
    """How a changed value is treated."""

    REFUSED = "refused"
    """It would be another run: refused in one line, exit code 2."""
    APPLIES = "applies"
    """It applies from the resumed step on, which is reported in one line."""
    OF_THIS_START = "of this start"
    """It says where and how this job runs, not what it trains: it applies without a message."""


class Renewed(Enum):
    """What an earlier job determined and a change invalidates."""

    COSTS = "the ranks are benchmarked again"
    EXCLUSION = "which ranks are excluded"
    PLAN = "the batch sizes"
    ALLREDUCE = "how gradients cross device kinds"


@dataclass(frozen=True)
class Rule:
    """How a changed flag is treated, and what it invalidates."""

    on_change: OnChange
    renews: frozenset[Renewed] = frozenset()


def _applies(*renews: Renewed) -> Rule:
    return Rule(OnChange.APPLIES, frozenset(renews))


_REFUSED = Rule(OnChange.REFUSED)
_OF_THIS_START = Rule(OnChange.OF_THIS_START)
_APPLIES = _applies()
# Other costs make another plan, and other ranks may be worth their communication.
_NEW_COSTS = _applies(Renewed.COSTS, Renewed.EXCLUSION, Renewed.PLAN)
_NEW_PLAN = _applies(Renewed.EXCLUSION, Renewed.PLAN)

RULES: Mapping[str, Rule] = {
    "model": _REFUSED,
    "dataset": _REFUSED,
    "data_dir": _OF_THIS_START,  # the files may have moved; the data themselves are compared
    "val_split": _REFUSED,
    "augment": _APPLIES,
    "workers": _APPLIES,
    "global_batch_size": _NEW_PLAN,
    "batch_policy": _NEW_PLAN,
    "batch_size": _NEW_PLAN,
    "balance": _NEW_PLAN,
    "benchmark_seconds": _APPLIES,
    "benchmark_cache": _APPLIES,
    "micro_batch_size": _NEW_COSTS,
    "keep_all": _NEW_PLAN,
    "allreduce": _applies(Renewed.ALLREDUCE, Renewed.EXCLUSION),
    "devices": _OF_THIS_START,  # as mpirun's hosts and number of ranks are
    "emulate_kinds": _OF_THIS_START,
    "emulate_slowdown": _OF_THIS_START,
    "epochs": _APPLIES,
    "max_steps": _APPLIES,
    "lr": _APPLIES,
    "momentum": _APPLIES,
    "nesterov": _APPLIES,
    "weight_decay": _APPLIES,
    "label_smoothing": _APPLIES,
    "schedule": _APPLIES,
    "warmup": _APPLIES,
    "precision": _NEW_COSTS,
    "memory_format": _NEW_COSTS,
    "max_bad_steps": _APPLIES,
    "check_every": _APPLIES,
    "resume": _OF_THIS_START,
    "checkpoint_every": _APPLIES,
    "checkpoint_minutes": _APPLIES,
    "keep_checkpoints": _APPLIES,
    "spares": _NEW_PLAN,
    "step_timeout": _APPLIES,
    "snapshots": _OF_THIS_START,
    "snapshot_every": _APPLIES,
    "seed": _REFUSED,
    "run_dir": _OF_THIS_START,
    "log_interval": _APPLIES,
    "log_level": _APPLIES,
}


@dataclass(frozen=True)
class Changes:
    """What the flags of this job change against those of the job that wrote the checkpoint."""

    refused: str = ""
    """Why this job cannot resume it; empty where it can."""
    lines: tuple[str, ...] = ()
    """Lines to report, one per changed flag."""
    renewed: frozenset[Renewed] = frozenset()
    """What has to be determined again."""


def compare_flags(then: Mapping[str, Any], now: TrainConfig, ranks_are_known: bool) -> Changes:
    """Return what changed flags mean for a run that is resumed.

    Args:
        then: the settings by name, as the checkpoint has them; a setting that it lacks is newer
            than the checkpoint and counts as the same.
        now: the settings of this job.
        ranks_are_known: whether the earlier job has benchmarked all ranks of this one.
    """
    changed = {
        name: (then[name], value)
        for name, value in asdict(now).items()
        if name in then and then[name] != value
    }
    for name, (before, value) in changed.items():
        if RULES[name].on_change is OnChange.REFUSED:
            return Changes(
                f"{flag_name(name)}: found {value!r}, needed {before!r}, with which the "
                "checkpoint was made; give the same, or another --run-dir"
            )
    renewed = frozenset().union(*(RULES[name].renews for name in changed))
    benchmarks = now.balance != "off" and (not ranks_are_known or Renewed.COSTS in renewed)
    lines = tuple(
        _line(name, before, value, now, benchmarks)
        for name, (before, value) in changed.items()
        if RULES[name].on_change is OnChange.APPLIES
    )
    return Changes("", lines, renewed)


def _line(name: str, before: Any, value: Any, now: TrainConfig, benchmarks: bool) -> str:
    if why := _without_effect(name, now, benchmarks):
        return f"{flag_name(name)} changed from {before!r} to {value!r}, which is ignored: {why}"
    again = Renewed.COSTS in RULES[name].renews and now.balance != "off"
    note = f"; {Renewed.COSTS.value}" if again else ""
    return f"{flag_name(name)} changed from {before!r} to {value!r}{note}"


def _without_effect(name: str, now: TrainConfig, benchmarks: bool) -> str:
    """Return why a flag's new value changes nothing in this job; empty where it may."""
    if name in ("benchmark_seconds", "benchmark_cache") and not benchmarks:
        why = "--balance off needs none" if now.balance == "off" else "all ranks have been"
        return f"no rank is benchmarked; {why}"
    if name == "batch_size" and now.batch_policy != "paper":
        return "it is used with --batch-policy paper only"
    if name == "global_batch_size" and now.batch_policy == "paper":
        return "it is used with --batch-policy global only"
    return ""
