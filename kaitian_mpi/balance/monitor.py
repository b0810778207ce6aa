"""How fast a rank computes now, from noisy steps."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_WINDOW = 30
_NEWEST = 3
_LEAST_CHANGE = 0.1  # of the logarithm: what a change of 10% makes
_NOISE_AT_FIRST = 0.1
# Of normal errors: the median of the differences of neighbours is so many standard deviations, and
# a median's standard error so many times that of a mean.
_MEDIAN_DIFFERENCE = 0.954
_MEDIAN_ERROR = 1.253


class SpeedMonitor:
    """Follows how many times as long as its cost model says a rank computes.

    The estimate is the median of the steps since the last change, 30 at most, so that old steps
    are forgotten and single slow ones do not count. Three steps in a row that all lie to one side,
    by more than 10% and more than three times the usual noise, are a change: what was before them
    is forgotten at once. All in logarithms, as a rank is so many times slower.
    """

    def __init__(self) -> None:
        self._estimate = 0.0
        self._logs: deque[float] = deque(maxlen=_WINDOW)
        self._differences: deque[float] = deque(maxlen=_WINDOW)

    @property
    def steps(self) -> int:
        """How many steps the estimate rests on."""
        return len(self._logs)

    @property
    def log_factor(self) -> float:
        """The estimate's logarithm; 0 before any step."""
        return self._estimate

    @property
    def log_error(self) -> float:
        """The standard error of `log_factor`; infinite before any step."""
        if not self._logs:
            return math.inf
        return _MEDIAN_ERROR * self._noise() / math.sqrt(len(self._logs))

    def observe(self, ratio: float) -> None:
        """Take in a step that took `ratio` times as long as the cost model says, above 0."""
        value = math.log(ratio)
        if self._logs:
            self._differences.append(abs(value - self._logs[-1]))
        self._logs.append(value)
        if self._has_changed():
            newest = list(self._logs)[-_NEWEST:]
            self._logs.clear()
            self._logs.extend(newest)
        self._estimate = median(self._logs)

    def restart(self) -> None:
        """Forget the steps, not the estimate: from now on the rank takes another batch."""
        self._logs.clear()

    def _noise(self) -> float:
        """Return the standard deviation of a step, whatever changes there have been."""
        if len(self._differences) < _NEWEST:
            return _NOISE_AT_FIRST
        return median(self._differences) / _MEDIAN_DIFFERENCE

    def _has_changed(self) -> bool:
        values = list(self._logs)
        before, newest = values[:-_NEWEST], values[-_NEWEST:]
        if len(before) < _NEWEST:
            return False
        off = [value - median(before) for value in newest]
        least = max(_LEAST_CHANGE, 3 * self._noise())
        return min(off) > least or max(off) < -least
