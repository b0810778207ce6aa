"""The content of a run's files, as plain values; anything may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PHASES = ("data", "forward", "backward", "compute", "optimizer", "wait")
"""Parts of a step; `compute` stands for forward, backward and optimizer if these are unknown."""
_COMPUTING = ("forward", "backward", "compute", "optimizer")


@dataclass(frozen=True)
class Rank:
    """A process of the job."""

    rank: int
    host: str = ""
    kind: str = ""
    device: str = ""
    library: str = ""
    emulated: bool = False
    is_leader: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.kind})" if self.kind else "")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Means over the steps between two readings. Per-rank tuples are in the order of `ranks`."""

    step: int
    """The last step."""
    steps: int = 1
    """The number of steps."""
    at_sec: float
    """Seconds since the run's start, without the time between jobs."""
    loss: float | None
    samples_per_sec: float | None
    step_time_sec: float | None
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    phases: Mapping[str, tuple[float | None, ...]]
    """Mean seconds per step by rank, by phase; None if a rank has none."""
    logged: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The seconds of all its steps."""
        return (self.step_time_sec or 0.0) * self.steps

    def busy(self) -> dict[int, float]:
        """Return the percentage of its time that each rank computed; unknown ranks are left out."""
        percent = {}
        for place, rank in enumerate(self.ranks):
            times = [self.phases[name][place] for name in _COMPUTING if name in self.phases]
            measured_sec = [seconds for seconds in times if seconds is not None]
            if measured_sec and self.step_time_sec:
                percent[rank] = min(100.0, 100 * sum(measured_sec) / self.step_time_sec)
        return percent


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """New batch sizes, which apply from a step on."""

    step: int
    at_sec: float
    batch_sizes: Mapping[int, int]
    """By rank."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class RecordedEvent:
    """A line of events.jsonl: a loss, a slow rank, a checkpoint."""

    kind: str
    step: int
    at_sec: float
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Everything that could be read from a run's folder."""

    path: Path
    name: str
    state: str
    """`finished`, `stopped` or `unfinished`."""
    emulated: bool
    ranks: Mapping[int, Rank]
    steps: int
    """The number of steps done."""
    intervals: tuple[Interval, ...]
    evaluations: Mapping[int, Mapping[str, float]]
    """Held-out results by step."""
    plans: tuple[PlanChange, ...]
    events: tuple[RecordedEvent, ...]
    facts: Mapping[str, str]
    """Facts about the whole run from its files, ready to show, by name."""
    samples_per_sec: float | None
    training_time_sec: float | None
    missing: list[str] = field(default_factory=list)
    """A sentence for each file that could not be read."""

    @property
    def results(self) -> Mapping[str, float]:
        """The last held-out results."""
        return list(self.evaluations.values())[-1] if self.evaluations else {}

    @property
    def rate(self) -> float | None:
        """Mean samples per second, from the readings if the summary has none; None if unknown."""
        timed = [i for i in self.intervals if i.samples_per_sec and i.seconds]
        if self.samples_per_sec or not timed:
            return self.samples_per_sec or None
        samples = sum((i.samples_per_sec or 0.0) * i.seconds for i in timed)
        return samples / sum(i.seconds for i in timed)
