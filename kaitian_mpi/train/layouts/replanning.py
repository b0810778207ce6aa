"""Finds out, while a run trains, whether a new division of the model is worth moving it."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports

WINDOW = 10
"""A rank's work is the median of at most so many steps."""
_LEAST_STEPS = 4  # before plans are compared


class Proposal(NamedTuple):
    """What the measured steps have shown, and whether a new plan is worth the move."""

    factors: list[float]
    """By rank, its measured time divided by the planned one."""
    text: str
    """What changes, in words."""
    facts: Any = None
    """What else the layout has measured, as JSON can hold it."""
    moves: bool = True
    """Whether the training continues in another loop, with another plan."""


class Replanning(StepObserver):
    """Compares plans when epochs end and checkpoints are due, and has the loop begin again."""

    def __init__(self, config: TrainingConfig, loop: Loop, samples: int) -> None:
        """Follow a loop. Only steps in which the ranks report `samples` in total are compared."""
        self._config = config
        self._loop = loop
        self._samples = samples
        self._seconds: deque[np.ndarray] = deque(maxlen=WINDOW)

    @abstractmethod
    def _propose(self, work_sec: list[float], steps_left: int) -> Proposal | None:
        """Return what the steps have shown; None if nothing new. Rank 0's answer counts.

        Collective. `work_sec` has each rank's seconds per step, without waiting.
        """

    @abstractmethod
    def _follow(self, factors: Mapping[str, float], facts: Any) -> None:
        """Let the next plan use a proposal's facts, and its factors by place. Not collective."""

    def _step_counts(self, times: RankSteps) -> None:
        """Note what else a step that is compared has shown. Not collective."""

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if reports is None:
            return
        times = reports.times
        every = self._config.checkpoint_every
        if times.samples.sum() == self._samples and (times.steps > 0).all():
            self._seconds.append(times.work_sec)
            self._step_counts(times)
        if reports.wants_checkpoint.any() or (every and step.number % every == 0):
            self.epoch_ends()

    def epoch_ends(self) -> None:
        if len(self._seconds) < _LEAST_STEPS:
            return
        loop = self._loop
        progress = loop.progress
        world = loop.world
        work_sec: list[float] = np.median(self._seconds, axis=0).tolist()
        rank_proposal = self._propose(work_sec, progress.total_steps - progress.step)
        self._seconds.clear()
        proposal = gather_values(world.comm, rank_proposal)[0]
        if proposal is None:
            return
        factors, text, facts, moves = proposal  # `gather_values` has made a list of it
        places = [info.place for info in world.infos]
        self._follow(dict(zip(places, factors, strict=True)), facts)
        speeds = ", ".join(f"{factor:.2f}" for factor in factors)
        print_rank_0(
            world,
            f"step {progress.step}: ranks take {speeds} times as long as planned: {text}",
        )
        if moves:
            loop.mark_outdated()
