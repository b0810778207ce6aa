"""Comparisons in one run: a machine's speed drifts, so what is compared takes turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence


def in_turns(
    calls: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return what each call has measured in each round; collective if the calls are.

    Which of them comes first changes from round to round. The first `warm_up` rounds do not count.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warm_up, rounds):
        for name in list(calls) if turn % 2 else reversed(calls):
            value = calls[name]()
            if turn >= 0:
                found[name].append(value)
    return found


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratios of what was measured in the same rounds."""
    return [one / other for one, other in zip(above, below, strict=True)]


def quartiles(values: Iterable[float], form: str = ".3f") -> str:
    """Format the median, and the lower and upper quartile in parentheses."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"
