"""Values that sinks receive: readings, results, the script's own figures, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PHASES = ("compute", "wait", "data", "forward", "backward", "optimizer")  # of a step


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Measurements since the last reading; per-rank lists are in the order of `ranks`."""

    step: int
    """The number of steps done."""
    total_steps: int
    epoch: int
    """The epoch's number, from 0."""
    epochs: int
    """The number of epochs that the run will have; 0 if only the steps are limited."""
    epoch_fraction: float = 0.0
    """The fraction of the epoch's samples that is done, from 0 to 1."""
    steps: int = 1
    """The number of steps since the last reading, over which the means are taken."""
    time: float
    """Seconds since 1970."""
    loss: float
    """The mean over all samples since the last reading."""
    learning_rate: float
    samples_per_sec: float
    step_time_sec: float
    seconds_left: float | None
    """The estimated seconds until the run ends; None before the third step."""
    ranks: Sequence[int]
    """The world ranks that train."""
    batch_sizes: Sequence[int]
    """Samples per step of each rank."""
    compute_time_sec: Sequence[float]
    """Mean seconds per step of each rank, like all times below."""
    wait_time_sec: Sequence[float]
    data_time_sec: Sequence[float]
    forward_time_sec: Sequence[float] | None = None
    """Forward, backward and optimizer add up to the compute time; None if not measured."""
    backward_time_sec: Sequence[float] | None = None
    optimizer_time_sec: Sequence[float] | None = None
    logged: Mapping[str, float] = field(default_factory=dict)
    """The figures passed to `Training.log` since the last reading."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The results of an evaluation, or the figures that the script logs."""

    step: int
    """The number of steps done."""
    epoch: int
    """The epoch's number, from 0; for an evaluation, the epoch before it."""
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]
    """By name, such as `loss` and `accuracy`."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to the run: a new plan, lost ranks, the end."""

    step: int
    """The number of steps done."""
    time: float
    """Seconds since 1970."""
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


def epoch_text(epoch: int, epochs: int) -> str:
    """Return an epoch, counted from 0, of a number of them: `epoch 1/10`; without 0 of them."""
    return f"epoch {min(epoch + 1, epochs)}/{epochs}" if epochs else f"epoch {epoch + 1}"


def reading_values(reading: Reading) -> dict[str, float]:
    """Return a reading's numbers by name; times are mean seconds per step."""
    values = {
        "loss/train": reading.loss,
        "learning_rate": reading.learning_rate,
        "epoch": reading.epoch,
        "throughput/samples_per_sec": reading.samples_per_sec,
        "throughput/step_time_sec": reading.step_time_sec,
    }
    for rank, size in zip(reading.ranks, reading.batch_sizes, strict=True):
        values[f"batch_size/rank_{rank}"] = size
    for phase in _PHASES:
        seconds = getattr(reading, f"{phase}_time_sec")
        for rank, value in zip(reading.ranks, seconds or [], strict=bool(seconds)):
            values[f"time/{phase}/rank_{rank}"] = value
    return values | logged_values(reading.logged)


def logged_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the script's own figures, named as trackers show them."""
    return {f"logged/{name}": value for name, value in values.items()}


def number_text(value: float, digits: int = 4) -> str:
    """Return a number with this many significant digits, or all that are before its point."""
    return f"{value:,.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"
