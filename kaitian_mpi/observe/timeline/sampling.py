"""Which steps of a run are recorded in its timeline."""

from __future__ import annotations

FIRST_STEPS = 10
EVERY = 10
_STEPS_UNTIL_DOUBLED = 2_000


class Sampling:
    """Chooses the steps to record by their numbers alone, so that every rank chooses the same.

    Args:
        every: record the steps whose number is a multiple of this. 0: the first ten steps and every
            tenth, from step 2,000 on every 20th, from 6,000 on every 40th and so on, so that the
            file of a run of a million steps still opens.
    """

    def __init__(self, every: int = 0) -> None:
        assert every >= 0
        self._every = every

    def includes(self, step: int) -> bool:
        """Return whether a step, counted from 1, is recorded."""
        if self._every:
            return step % self._every == 0
        doublings = (step // _STEPS_UNTIL_DOUBLED + 1).bit_length() - 1
        return step <= FIRST_STEPS or step % (EVERY << doublings) == 0
