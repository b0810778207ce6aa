"""Finds out, while a run trains, whether another division of the model is worth a move."""

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
"""The steps, at most, by whose median a rank's work is judged."""
_LEAST_STEPS = 4


class Proposal(NamedTuple):
    """What is known of the ranks, by which another plan is worth its move."""

    factors: list[float]
    """By rank, what its time is of what was planned."""
    text: str
    """What changes, for a line."""
    facts: Any = None
    """What a layout knows besides, as JSON holds it."""
    moves: bool = True
    """Whether the training continues in another loop, with another plan."""


class Replanning(StepObserver):
    """Compares plans when epochs end and checkpoints are due, and has the loop begin again."""

    def __init__(self, config: TrainingConfig, loop: Loop, samples: int) -> None:
        """Follow a loop; only steps of so many samples, in the ranks' reports, are compared."""
        self._config = config
        self._loop = loop
        self._samples = samples
        self._seconds: deque[np.ndarray] = deque(maxlen=WINDOW)

    @abstractmethod
    def _propose(self, work_sec: list[float], steps_left: int) -> Proposal | None:
        """Return what the steps have shown, on rank 0; None if nothing new. Collective.

        `work_sec` are the ranks' seconds of a step, without waiting.
        """

    @abstractmethod
    def _follow(self, factors: Mapping[str, float], facts: Any) -> None:
        """Have what is planned next follow a proposal, by factors by place. Not collective."""

    def _step_counts(self, times: RankSteps) -> None:
        """Note what a step that is compared has shown besides. Not collective."""

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if reports is None:
            return
        times, every = reports.times, self._config.checkpoint_every
        if times.samples.sum() == self._samples and (times.steps > 0).all():
            self._seconds.append(times.work_sec)
            self._step_counts(times)
        if reports.wants_checkpoint.any() or (every and step.number % every == 0):
            self.epoch_ends()

    def epoch_ends(self) -> None:
        loop, progress = self._loop, self._loop.progress
        if len(self._seconds) < _LEAST_STEPS:
            return
        world = loop.world
        work_sec: list[float] = np.median(self._seconds, axis=0).tolist()
        proposal = self._propose(work_sec, progress.total_steps - progress.step)
        self._seconds.clear()
        if (proposal := gather_values(world.comm, proposal)[0]) is None:
            return
        factors, text, facts, moves = proposal
        by_place = {info.place: f for info, f in zip(world.infos, factors, strict=True)}
        self._follow(by_place, facts)
        speeds = ", ".join(f"{factor:.2f}" for factor in factors)
        text = f"ranks take {speeds} times what was planned: {text}"
        print_rank_0(world, f"step {progress.step}: {text}")
        if moves:
            loop.mark_outdated()
