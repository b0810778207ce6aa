"""Reads from the run folder whether a job has finished, and whether it makes progress."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kaitian_mpi.observe.files import read_json
from kaitian_mpi.train.summary import NAME, Summary


@dataclass(frozen=True)
class RunState:
    """A job's state at one moment, read from its run folder."""

    finished: bool = False
    steps: int = 0
    """Steps according to the summary."""
    metrics_bytes: int = 0
    """Size of metrics.jsonl, which grows every few steps."""

    losses: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False)
    """The time and the ranks of each loss that the run has survived, in any start."""
    confirmed_at: int = field(default=0, compare=False)
    """When the summary was last written or confirmed, in nanoseconds; 0 if there is none."""

    @property
    def trained(self) -> bool:
        """Whether any step has been trained, in any start."""
        return self.steps > 0 or self.metrics_bytes > 0

    def has_finished_since(self, before: RunState) -> bool:
        """Return whether the job has reported since then that it is finished."""
        return self.finished and (not before.finished or self.confirmed_at != before.confirmed_at)

    def lost_ranks_since(self, before: RunState) -> set[int]:
        """Return the ranks that were lost since then, if the job continues without them."""
        return {rank for loss in self.losses if loss not in before.losses for rank in loss[1]}

    def is_beyond(self, before: RunState) -> bool:
        """Return whether steps have been trained since then."""
        return self.steps > before.steps or self.metrics_bytes > before.metrics_bytes


def read_state(folder: Path) -> RunState:
    """Read a run folder; return the default state if it is missing or unreadable."""
    summary = Summary.from_json(read_json(folder / NAME))
    confirmed_at = metrics_bytes = 0
    with suppress(OSError):
        confirmed_at = (folder / NAME).stat().st_mtime_ns
    with suppress(OSError):
        metrics_bytes = (folder / "metrics.jsonl").stat().st_size
    return RunState(
        finished=summary.finished,
        steps=summary.steps or 0,
        metrics_bytes=metrics_bytes,
        losses=tuple(_loss(entry) for entry in summary.failures or () if isinstance(entry, dict)),
        confirmed_at=confirmed_at,
    )


def _loss(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    listed = entry.get("ranks")
    infos = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    ranks = [info.get("rank") for info in infos]
    return str(entry.get("at")), tuple(rank for rank in ranks if isinstance(rank, int))
