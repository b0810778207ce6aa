"""Estimates a rank's current speed from noisy step times."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_WINDOW = 30
_NEWEST = 3
_MIN_CHANGE = 0.1  # of the logarithm: about 10%
_INITIAL_NOISE = 0.1
# For normally distributed errors: the median of the differences of neighbours in standard
# deviations, and a median's standard error relative to that of a mean.
_MEDIAN_DIFFERENCE = 0.954
_MEDIAN_ERROR = 1.253


class SpeedMonitor:
    """Tracks a rank's compute time relative to its cost model.

    The estimate is the median of the steps since the last change, at most 30, so that old steps
    are dropped and single slow steps do not matter. Three consecutive steps that deviate in the
    same direction, by more than 10% and by more than three times the usual noise, are a change:
    all earlier steps are dropped. Everything is in logarithms, because slowdowns are factors.
    """

    def __init__(self) -> None:
        self._estimate = 0.0
        self._logs: deque[float] = deque(maxlen=_WINDOW)
        self._differences: deque[float] = deque(maxlen=_WINDOW)

    @property
    def steps(self) -> int:
        """The number of steps that the estimate is based on."""
        return len(self._logs)

    @property
    def log_factor(self) -> float:
        """The logarithm of the estimate; 0 before any step."""
        return self._estimate

    @property
    def log_error(self) -> float:
        """The standard error of `log_factor`; infinite before any step."""
        if not self._logs:
            return math.inf
        return _MEDIAN_ERROR * self._noise() / math.sqrt(len(self._logs))

    def observe(self, ratio: float) -> None:
        """Add a step that took `ratio` times as long as the cost model predicts, above 0."""
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
        """Drop the steps but keep the estimate, because the rank's batch size changes."""
        self._logs.clear()

    def _noise(self) -> float:
        """Return the standard deviation of a step, robust to changes of speed."""
        if len(self._differences) < _NEWEST:
            return _INITIAL_NOISE
        return median(self._differences) / _MEDIAN_DIFFERENCE

    def _has_changed(self) -> bool:
        values = list(self._logs)
        before, newest = values[:-_NEWEST], values[-_NEWEST:]
        if len(before) < _NEWEST:
            return False
        deviations = [value - median(before) for value in newest]
        threshold = max(_MIN_CHANGE, 3 * self._noise())
        return min(deviations) > threshold or max(deviations) < -threshold
