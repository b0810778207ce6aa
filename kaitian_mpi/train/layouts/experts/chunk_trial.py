"""Finds in the first steps of a run the fastest number of chunks to send tokens in."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.train.layouts.experts.dispatcher import Dispatcher
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports

_CHOICES = 1, 2, 4, 8
_ROUNDS = 3  # after a first step, in which much happens only once


class ChunkTrial(StepObserver):
    """Takes each number of chunks in turn for some steps, and then the fastest."""

    def __init__(
        self, world: World, dispatcher: Dispatcher, steps_left: int, chosen: Callable[[int], None]
    ) -> None:
        """Begin, on all ranks at the same step.

        `steps_left` are those of the run: a trial takes few of them, or there is none. `chosen` is
        called with the fastest number.
        """
        self._world = world
        self._chosen = chosen
        self._dispatcher = dispatcher
        self._seconds: dict[int, list[float]] = {chunks: [] for chunks in _CHOICES}
        trials = list(_CHOICES) * _ROUNDS
        self._trials_left = trials if world.size > 1 and steps_left > 4 * len(trials) else []
        self.is_over = not self._trials_left
        self._current: int | None = None
        self._before = 0.0

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if self._current is not None:
            self._seconds[self._current].append(self._dispatcher.total_sec - self._before)
            self._current = None
            if not self._trials_left:
                self._choose()
                self.is_over = True
        if self._trials_left:
            self._current = self._trials_left.pop(0)
            self._dispatcher.set_chunks(self._current)
            self._before = self._dispatcher.total_sec

    def _choose(self) -> None:
        rank_sec = [median(self._seconds[chunks]) for chunks in _CHOICES]
        by_rank = gather_values(self._world.comm, rank_sec)
        slowest = [max(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
        seconds = dict(zip(_CHOICES, slowest, strict=True))
        fastest = min(seconds, key=lambda chunks: (seconds[chunks], chunks))
        self._dispatcher.set_chunks(fastest)
        self._chosen(fastest)
        text = ", ".join(f"{chunks}: {1e3 * sec:.1f} ms" for chunks, sec in seconds.items())
        word = "chunk" if fastest == 1 else "chunks"
        print_rank_0(
            self._world,
            f"tokens travel in {fastest} {word} from now on (the time in a step until all are "
            f"computed and back, by number: {text})",
        )
