"""What the ranks report of a step: a row for each, or a column for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RankStep:
    """A rank's times of a step. Seconds are per step."""

    steps: int
    """The number of steps averaged; 0 if the device has not finished one yet."""
    samples: int
    work_sec: float
    """Time to get the batch and compute, without waiting for other ranks."""
    wait_sec: float
    """Time spent only waiting for communication."""


@dataclass(frozen=True)
class RankSteps:
    """All ranks' times of a step, as arrays with one entry per rank.

    They are examined after every step. In a job of thousands of ranks, handling an object for each
    rank would take longer than a short step.
    """

    steps: np.ndarray
    samples: np.ndarray
    work_sec: np.ndarray
    wait_sec: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[RankStep]) -> RankSteps:
        """Return the ranks' rows as columns."""
        return cls(
            np.array([row.steps for row in rows]),
            np.array([row.samples for row in rows]),
            np.array([row.work_sec for row in rows]),
            np.array([row.wait_sec for row in rows]),
        )

    def rows(self) -> list[RankStep]:
        """Return a row for each rank."""
        columns = (self.steps, self.samples, self.work_sec, self.wait_sec)
        return [RankStep(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
