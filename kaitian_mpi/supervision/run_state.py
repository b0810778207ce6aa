"""What the run folder tells about a job: whether it has ended well, and whether it gets on."""

from __future__ import annotations

import json
from dataclasses import dataclass
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

    @property
    def trained(self) -> bool:
        """Whether any step has been trained, in whichever start."""
        return self.steps > 0 or self.metrics_bytes > 0

    def is_beyond(self, before: RunState) -> bool:
        """Return whether steps have been trained since; a start may begin with older ones."""
        return self.steps > before.steps or self.metrics_bytes > before.metrics_bytes


def read_state(folder: Path) -> RunState:
    """Read a run folder; one that is missing or unreadable tells of nothing."""
    summary = _read_summary(folder / "summary.json")
    steps = summary.get("steps", 0)
    try:
        metrics_bytes = (folder / "metrics.jsonl").stat().st_size
    except OSError:
        metrics_bytes = 0
    return RunState(
        finished=summary.get("finished") is True,
        steps=steps if isinstance(steps, int) else 0,
        metrics_bytes=metrics_bytes,
    )


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
