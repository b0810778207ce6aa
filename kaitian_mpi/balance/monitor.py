"""Estimates the ranks' current speeds from noisy step times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_WINDOW = 30
_NEWEST = 3
_MIN_CHANGE = 0.1  # of the logarithm: about 10%
_INITIAL_NOISE = 0.1
# For normally distributed errors: the median of the differences of neighbors in standard
# deviations, and a median's standard error relative to that of a mean.
MEDIAN_DIFFERENCE = 0.954
_MEDIAN_ERROR = 1.253
_NO_VALUE = 1e300  # sorted behind all values


@dataclass(frozen=True)
class RankSteps:
    """All ranks' times of a step, as arrays with one entry per rank. Seconds are per step.

    They are examined after every step. In a job of thousands of ranks, handling an object for each
    rank would take longer than a short step.
    """

    steps: np.ndarray
    """The number of steps averaged; 0 if the device has not finished one yet."""
    samples: np.ndarray
    work_sec: np.ndarray
    """Time to get the batch and compute, without waiting for other ranks."""
    wait_sec: np.ndarray
    """Time spent only waiting for communication."""


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

    def observe(self, ratios: np.ndarray, seen: np.ndarray) -> None:
        """Add how many times as long as its cost model predicts each rank that was seen took."""
        # Not numpy's: the last bit of that depends on the processor, and the ranks must agree.
        values = np.array([math.log(ratio) for ratio in ratios.tolist()])
        differences = np.abs(values - self._logs.newest(1)[:, 0])
        self._differences.append(differences, seen & (self.steps > 0))
        self._logs.append(values, seen)
        changed = self._have_changed() & seen
        if changed.any():
            self._logs.keep_newest(_NEWEST, changed)
        self.log_factors = np.where(seen, self._logs.medians(), self.log_factors)

    def restart(self) -> None:
        """Drop the steps but keep the estimates, because the ranks' batch sizes change."""
        self._logs = _History(len(self.log_factors))

    def _noise(self) -> np.ndarray:
        """Return the standard deviations of a step, robust to changes of speed."""
        known = self._differences.counts >= _NEWEST
        noise = self._differences.medians() / MEDIAN_DIFFERENCE
        return np.where(known, noise, _INITIAL_NOISE)

    def _have_changed(self) -> np.ndarray:
        """Return which ranks' speeds have changed."""
        deviations = self._logs.newest(_NEWEST) - self._logs.medians(_NEWEST)[:, None]
        # How far the newest steps deviate in the same direction.
        shift = np.maximum(deviations.min(1), -deviations.max(1))
        far: np.ndarray = (shift > _MIN_CHANGE) & (self.steps >= 2 * _NEWEST)
        return far & (shift > 3 * self._noise()) if far.any() else far  # most steps find none


class _History:
    """The newest values of each rank, at most 30."""

    def __init__(self, ranks: int) -> None:
        self.counts = np.zeros(ranks, int)
        self._ranks = np.arange(ranks)
        self._values = np.full((ranks, _WINDOW), _NO_VALUE)  # the newest one in the last column

    def append(self, values: np.ndarray, to: np.ndarray) -> None:
        """Add a value to each of some ranks."""
        rows = slice(None) if to.all() else np.flatnonzero(to)  # a slice copies nothing
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

    def medians(self, without_newest: int = 0) -> np.ndarray:
        """Return each rank's median; meaningless for a rank without values."""
        ordered = np.sort(self._values[:, : _WINDOW - without_newest])
        last = np.maximum(self.counts - without_newest, 1) - 1
        return (ordered[self._ranks, last // 2] + ordered[self._ranks, (last + 1) // 2]) / 2
