"""Statistics over trials in which an event may not have happened."""

from __future__ import annotations

import statistics
from collections.abc import Iterable


def in_seconds(value: float | None, digits: int = 2) -> str:
    """Format seconds: `0.61 s`, or `never` for None."""
    return "never" if value is None else f"{value:.{digits}f} s"


def or_infinite(values: Iterable[float | None]) -> list[float]:
    """Return the values with infinity in place of None."""
    return [float("inf") if value is None else value for value in values]


def middle_and_worst(values: Iterable[float | None]) -> list[float]:
    """Return the median and the largest value."""
    known = or_infinite(values)
    return [round(statistics.median(known), 3), round(max(known), 3)]
