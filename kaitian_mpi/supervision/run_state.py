"""What the run folder tells about a job: whether it has ended well, and whether it gets on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunState:
    """A job as its folder shows it at one moment."""

    finished: bool = False
    steps: int = 0
    """Steps of training that the summary tells of."""
    metrics_bytes: int = 0
    """Size of the file that gets a line every few steps, in every start."""

    told_at: int = field(default=0, compare=False)
    """When the summary was last confirmed, in nanoseconds; 0 where there is none."""

    @property
    def trained(self) -> bool:
        """Whether any step has been trained, in whichever start."""
        return self.steps > 0 or self.metrics_bytes > 0

    def has_finished_since(self, before: RunState) -> bool:
        """Return whether the job has said since that it is finished; it may have been before."""
        return self.finished and (not before.finished or self.told_at != before.told_at)

    def is_beyond(self, before: RunState) -> bool:
        """Return whether steps have been trained since; a start may begin with older ones."""
        return self.steps > before.steps or self.metrics_bytes > before.metrics_bytes


def read_state(folder: Path) -> RunState:
    """Read a run folder; one that is missing or unreadable tells of nothing."""
    summary = _read_summary(folder / "summary.json")
    steps = summary.get("steps", 0)
    told, metrics = _stat(folder / "summary.json"), _stat(folder / "metrics.jsonl")
    return RunState(
        finished=summary.get("finished") is True,
        steps=steps if isinstance(steps, int) else 0,
        metrics_bytes=metrics.st_size if metrics is not None else 0,
        told_at=told.st_mtime_ns if told is not None else 0,
    )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
