"""Estimates how long a run will still take. Pure."""

from __future__ import annotations

from collections import deque

_MIN_STEPS = 3
_WARM_UP_STEPS = 1
_WINDOW_SEC = 60.0


class TimeLeft:
    """The mean of a run's last steps, and of its evaluations, as an estimate of what is to come.

    The first step does not count, unless it comes in one reading with others: it prepares kernels,
    memory and the data's readers.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque()
        self._steps = 0
        self._evaluations: list[float] = []

    def steps_done(self, steps: int, seconds: float) -> None:
        """Take a reading: some steps and the seconds that they took."""
        if self._steps <= _WARM_UP_STEPS:
            self._last.clear()
        self._steps += steps
        self._last.append((steps, seconds))
        while sum(sec for _, sec in self._last) - self._last[0][1] >= _WINDOW_SEC:
            self._last.popleft()

    def evaluation_done(self, seconds: float) -> None:
        """Take the seconds between the last step of an epoch and the first one of the next."""
        self._evaluations.append(seconds)

    def estimate(
        self, steps_left: int, evaluations_left: int, evaluation_sec: float
    ) -> float | None:
        """Return the seconds until the end; None before the third step.

        `evaluation_sec` is how long an evaluation may take, until one is done.
        """
        if self._steps < _MIN_STEPS:
            return None
        done = self._evaluations
        evaluation = sum(done) / len(done) if done else evaluation_sec
        steps, seconds = (sum(values) for values in zip(*self._last, strict=True))
        return steps_left * seconds / steps + evaluations_left * evaluation
