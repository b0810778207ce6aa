"""What sinks receive: readings, results and the script's own figures, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PHASES = ("compute", "wait", "data", "forward", "backward", "optimizer")  # of a step


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was measured since the last reading; per-rank lists are in the order of `ranks`."""

    step: int
    """The number of steps done."""
    total_steps: int
    epoch: int
    """From 0."""
    epochs: int
    """The number of epochs that the run will have."""
    epoch_fraction: float = 0.0
    """The fraction of the epoch's samples that is done, from 0 to 1."""
    steps: int = 1
    """The number of steps since the last reading, over which the means are taken."""
    time: float
    """In seconds since 1970."""
    loss: float
    """The mean over all samples since the last reading."""
    learning_rate: float
    samples_per_sec: float
    step_time_sec: float
    seconds_left: float
    """The forecast for the rest of the run."""
    ranks: Sequence[int]
    """The world ranks that train."""
    batch_sizes: Sequence[int]
    """Samples per step of each rank."""
    compute_time_sec: Sequence[float]
    """Mean per step, as are all times by rank."""
    wait_time_sec: Sequence[float]
    data_time_sec: Sequence[float]
    forward_time_sec: Sequence[float] | None = None
    """Forward, backward and optimizer add up to the compute time. None if not measured."""
    backward_time_sec: Sequence[float] | None = None
    optimizer_time_sec: Sequence[float] | None = None
    logged: Mapping[str, float] = field(default_factory=dict)
    """The figures that the script has given `Training.log` since the last reading."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The results of an evaluation, or what the script logs."""

    step: int
    """The number of steps done."""
    epoch: int
    """From 0; of an evaluation, the one that it follows."""
    time: float
    """In seconds since 1970."""
    values: Mapping[str, float]
    """By name, such as `loss` and `accuracy`."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to the run: a new plan, lost ranks, the end."""

    step: int
    """The number of steps done."""
    time: float
    """In seconds since 1970."""
    kind: str
    """`start`, `resume`, `exclusion`, `plan`, `slow`, `slow_end`, `loss`, `recovery`, `checkpoint`,
    `bad_step`, `divergence`, `stop` or `finish`."""
    text: str
    """A sentence for people."""
    ranks: Sequence[int] = ()
    """The world ranks that it concerns."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """A JSON object."""


def duration(seconds: float | None) -> str:
    """Format a duration: `0:07`, `12:34`, `3:07:09`; empty if it is not known."""
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def of_reading(reading: Reading) -> dict[str, float]:
    """Return a reading's numbers; times are mean seconds per step, by phase and world rank."""
    found = {
        "loss/train": reading.loss,
        "learning_rate": reading.learning_rate,
        "epoch": reading.epoch,
        "throughput/samples_per_sec": reading.samples_per_sec,
        "throughput/step_time_sec": reading.step_time_sec,
    }
    for rank, size in zip(reading.ranks, reading.batch_sizes, strict=True):
        found[f"batch_size/rank_{rank}"] = size
    for phase in _PHASES:
        seconds = getattr(reading, f"{phase}_time_sec")
        for rank, value in zip(reading.ranks, seconds or [], strict=bool(seconds)):
            found[f"time/{phase}/rank_{rank}"] = value
    return found | of_logged(reading.logged)


def of_logged(values: Mapping[str, float]) -> dict[str, float]:
    """Return the script's own figures by the names that other programs show."""
    return {f"logged/{name}": value for name, value in values.items()}
