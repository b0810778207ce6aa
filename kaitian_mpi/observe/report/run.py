"""What is known of a run, as plain values; anything may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaitian_mpi.observe.report.json_values import named_numbers, number, text, whole

PHASES = ("data", "forward", "backward", "optimizer", "compute", "wait")
"""Parts of a step; `compute` stands for forward, backward and optimizer where these are unknown."""


@dataclass(frozen=True)
class Rank:
    """A process of the job."""

    rank: int
    host: str = ""
    kind: str = ""
    device: str = ""
    device_name: str = ""
    library: str = ""
    emulated: bool = False
    slowdown: str = ""
    """The emulated slowdown, such as `3x from step 20`."""

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.kind})" if self.kind else "")


@dataclass(frozen=True)
class Group:
    """The ranks of one kind of device."""

    kind: str
    ranks: tuple[int, ...]
    leader: int | None


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Means over the steps between two readings. Per-rank tuples are in the order of `ranks`."""

    step: int
    """The last step."""
    steps: int
    """The number of steps."""
    at_sec: float
    """Seconds since the run's start, without the time between jobs."""
    loss: float | None = None
    samples_per_sec: float | None = None
    step_time_sec: float | None = None
    ranks: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    phases: Mapping[str, tuple[float, ...]]
    """Mean seconds per step by rank, by phase; NaN where a rank has none."""
    logged: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """How long its steps took."""
        return (self.step_time_sec or 0.0) * self.steps


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out results."""

    step: int
    at_sec: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """Batch sizes from a step on."""

    step: int
    at_sec: float
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of events.jsonl: a loss, a slow rank, a checkpoint; its end is added to it."""

    kind: str
    step: int
    at_sec: float
    text: str
    ranks: tuple[int, ...] = ()
    until_step: int | None = None
    until_sec: float | None = None
    """When it ended, for a slow rank or a loss."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that could be read from a run's folder."""

    path: Path
    name: str
    state: str
    """`finished`, `stopped` or `unfinished`."""
    emulated: bool
    ranks: Mapping[int, Rank]
    groups: tuple[Group, ...]
    steps: int
    """How many are done."""
    intervals: tuple[Interval, ...]
    evaluations: tuple[Evaluation, ...]
    plans: tuple[PlanChange, ...]
    events: tuple[Event, ...]
    algorithm: str
    """By which gradients are summed between kinds; empty if unknown, or if they never are."""
    allreduce_sec: Mapping[str, float]
    """Measured seconds by algorithm."""
    facts: Mapping[str, str]
    """What the summary says, ready to show, by name."""
    samples_per_sec: float | None
    training_time_sec: float | None
    missing: list[str]
    """What could not be read, a sentence each."""

    @property
    def results(self) -> Mapping[str, float]:
        """The last held-out results."""
        return self.evaluations[-1].values if self.evaluations else {}

    @property
    def rate(self) -> float | None:
        """Mean samples per second, from the readings if the summary has none; None if unknown."""
        if self.samples_per_sec:
            return self.samples_per_sec
        samples = seconds = 0.0
        for interval in self.intervals:
            if interval.samples_per_sec and interval.step_time_sec:
                passed = interval.steps * interval.step_time_sec
                samples, seconds = samples + interval.samples_per_sec * passed, seconds + passed
        return samples / seconds if seconds else None


def describe_facts(config: dict[str, Any], summary: dict[str, Any]) -> dict[str, str]:
    """Return what the files say of the whole run, by name; only what is known."""
    facts = {
        "trained": _trained(config),
        "ranks that train": _shown(summary.get("world_size")),
        "steps": _shown(summary.get("steps")),
        "epochs": _epochs(config, summary),
        "global batch": _shown(summary.get("global_batch_size"), "{:,.0f} samples per step"),
        "rate": _shown(summary.get("samples_per_sec"), "{:,.1f} samples/s"),
        "mean step": _shown(summary.get("step_time_sec"), "{:,.1f} ms", 1e3),
        "training time": format_duration(number(summary.get("training_time_sec"))),
        "start-up": _startup(summary),
        "sum of gradients between kinds": text(summary.get("allreduce")).removeprefix("direct"),
        "gradients between hosts": text(summary.get("wire")),
        "kinds compute alike": _yes_or_no(summary.get("parity")),
        "balance": text(config.get("balance")),
        "precision": text(config.get("precision")),
        "torch": text(summary.get("torch_version")),
    }
    for name, value in list(named_numbers(summary.get("validation")).items())[:8]:
        facts[f"held-out {name}"] = f"{value:.4g}"
    bad = whole(summary.get("bad_steps"))
    if bad:
        facts["skipped steps"] = f"{bad:,} (a gradient that was not finite)"
    return {name: value for name, value in facts.items() if value}


def _yes_or_no(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else ""


def _trained(config: dict[str, Any]) -> str:
    task = text(config.get("task"))
    if task:
        return task
    model, data = text(config.get("model")), text(config.get("dataset"))
    return f"{model} on {data}" if model and data else model


def _epochs(config: dict[str, Any], summary: dict[str, Any]) -> str:
    done, wanted = whole(summary.get("epochs")), whole(config.get("epochs"))
    if done is None:
        return ""
    return f"{done:,} of {wanted:,}" if wanted else f"{done:,}"


def _shown(value: Any, form: str = "{:,.0f}", scale: float = 1.0) -> str:
    """Return a number as text; empty if it is none."""
    found = number(value)
    return "" if found is None else form.format(scale * found)


def _startup(summary: dict[str, Any]) -> str:
    phases = named_numbers(summary.get("startup_sec"))
    return format_duration(sum(phases.values())) if phases else ""


def format_duration(seconds: float | None) -> str:
    """Return `12.3 s`, `4 min 05 s` or `3 h 07 min`."""
    if seconds is None or seconds < 0:
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
