"""Estimates the ranks' current speeds from noisy step times."""

from __future__ import annotations

import math

import numpy as np

_WINDOW = 30
_NEWEST = 3
_MIN_CHANGE = 0.1  # of the logarithm: about 10%
_INITIAL_NOISE = 0.1
# For normally distributed errors: the median of the differences of neighbors in standard
# deviations, and a median's standard error relative to that of a mean.
_MEDIAN_DIFFERENCE = 0.954
_MEDIAN_ERROR = 1.253
_NO_VALUE = 1e300  # sorted behind all values


class SpeedMonitors:
    """Tracks the compute time of each rank relative to its cost model.

    The estimate is the median of the steps since the last change, at most 30, so that old steps
    are dropped and single slow steps do not matter. Three consecutive steps that deviate in the
    same direction, by more than 10% and by more than three times the usual noise, are a change:
    all earlier steps are dropped. Everything is in logarithms, because slowdowns are factors.

    Every array has one entry per rank.
    """

    def __init__(self, ranks: int) -> None:
        self.log_factors = np.zeros(ranks)
        """The logarithms of the estimates; 0 before any step."""
        self._logs = _History(ranks)
        self._differences = _History(ranks)

    @property
    def steps(self) -> np.ndarray:
        """The number of steps that each estimate is based on."""
        return self._logs.counts

    @property
    def log_errors(self) -> np.ndarray:
        """The standard errors of `log_factors`; infinite before any step."""
        errors = _MEDIAN_ERROR * self._noise() / np.sqrt(np.maximum(self.steps, 1))
        return np.where(self.steps > 0, errors, np.inf)

    def observe(self, ratios: np.ndarray, seen: np.ndarray | None = None) -> None:
        """Add a step.

        Args:
            ratios: how many times as long as its cost model predicts each rank took, above 0.
            seen: which of the ranks were timed; None for all.
        """
        if seen is not None and seen.all():
            seen = None
        # Not numpy's: the last bit of that depends on the processor, and the ranks must agree.
        values = np.array([math.log(ratio) for ratio in ratios.tolist()])
        has_neighbor = self.steps > 0
        differing = has_neighbor if seen is None else has_neighbor & seen
        self._differences.append(
            np.abs(values - self._logs.newest(1)[:, 0]), None if differing.all() else differing
        )
        self._logs.append(values, seen)
        changed = self._have_changed()
        if changed is not None:
            self._logs.keep_newest(_NEWEST, changed if seen is None else changed & seen)
        medians = self._logs.medians()
        self.log_factors = medians if seen is None else np.where(seen, medians, self.log_factors)

    def restart(self) -> None:
        """Drop the steps but keep the estimates, because the ranks' batch sizes change."""
        self._logs.clear()

    def _noise(self) -> np.ndarray:
        """Return the standard deviations of a step, robust to changes of speed."""
        known = self._differences.counts >= _NEWEST
        noise = self._differences.medians() / _MEDIAN_DIFFERENCE
        return np.where(known, noise, _INITIAL_NOISE)

    def _have_changed(self) -> np.ndarray | None:
        """Return which ranks' speeds have changed; None if none has."""
        deviations = self._logs.newest(_NEWEST) - self._logs.medians(_NEWEST)[:, None]
        # How far the newest steps deviate in the same direction.
        shift = np.maximum(deviations.min(1), -deviations.max(1))
        far = (shift > _MIN_CHANGE) & (self.steps >= 2 * _NEWEST)
        if not far.any():  # most steps end here
            return None
        return far & (shift > 3 * self._noise())


class _History:
    """The newest values of each rank, at most 30."""

    def __init__(self, ranks: int) -> None:
        self.counts = np.zeros(ranks, int)
        self._ranks = np.arange(ranks)
        self._values = np.full((ranks, _WINDOW), _NO_VALUE)  # the newest one in the last column

    def append(self, values: np.ndarray, to: np.ndarray | None) -> None:
        """Add a value to each of some ranks; None for all."""
        rows = slice(None) if to is None else np.flatnonzero(to)
        self._values[rows, :-1] = self._values[rows, 1:]
        self._values[rows, -1] = values[rows]
        self.counts[rows] = np.minimum(self.counts[rows] + 1, _WINDOW)

    def newest(self, count: int) -> np.ndarray:
        """Return the newest values, [ranks, count]; very large if there are fewer."""
        return self._values[:, -count:]

    def keep_newest(self, count: int, of: np.ndarray) -> None:
        """Drop the values of some ranks but for the newest ones."""
        self._values[of, :-count] = _NO_VALUE
        self.counts[of] = count

    def clear(self) -> None:
        """Drop all values."""
        self._values.fill(_NO_VALUE)
        self.counts.fill(0)

    def medians(self, without_newest: int = 0) -> np.ndarray:
        """Return each rank's median; meaningless for a rank without values."""
        ordered = np.sort(self._values[:, : _WINDOW - without_newest])
        last = np.maximum(self.counts - without_newest, 1) - 1
        return (ordered[self._ranks, last // 2] + ordered[self._ranks, (last + 1) // 2]) / 2
