"""Runs the rounds of a long collective, several at a time.

A round is a generator that does its part of the work and yields the MPI requests it has to wait
for. While one round waits for the network, others are reduced inside the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from mpi4py import MPI

from kaitian_mpi.runtime.polling import keep_alive, wait_until

# The kernel goes on sending and receiving meanwhile, and several rounds are under way, so that
# waking up a little late costs nothing; waking up often costs a core that other ranks need.
_YIELD_SEC = 50e-6
_NAP_SEC = 100e-6

Round = Iterator[Sequence[MPI.Request]]


class _Started:
    """A round in progress."""

    def __init__(self, steps: Round) -> None:
        self._steps = steps
        self._requests: Sequence[MPI.Request] | None = ()

    @property
    def is_done(self) -> bool:
        return self._requests is None

    def advance(self) -> bool:
        """Continue if MPI is done with all requests; return whether it was."""
        if self._requests is None or not MPI.Request.Testall(list(self._requests)):
            return False
        self._requests = next(self._steps, None)
        return True


def _advance(started: Sequence[_Started]) -> bool:
    """Continue all rounds that can; return whether any could."""
    return any([each.advance() for each in started])  # noqa: C419 - not only the first


def run_rounds(rounds: Iterable[Round], at_once: int) -> None:
    """Run rounds, of which at most `at_once` are in progress, and sleep while all of them wait.

    They are started in order, so ranks that run the same rounds do not wait for each other in a
    circle.
    """
    waiting = iter(rounds)
    started = [_Started(steps) for steps in islice(waiting, at_once)]
    try:
        while started:
            wait_until(partial(_advance, started), yield_sec=_YIELD_SEC, min_nap_sec=_NAP_SEC)
            started = [each for each in started if not each.is_done]
            started += [_Started(steps) for steps in islice(waiting, at_once - len(started))]
    except BaseException:
        keep_alive(started)  # MPI may still write to their buffers
        raise
