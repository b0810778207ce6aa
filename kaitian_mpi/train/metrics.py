"""Collects losses and times of all ranks while training, and gives them to the sinks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.reading import Figures, Reading
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.clock import StepClock
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import Step, StepObserver, StepReports


class RankSums(NamedTuple):
    """One rank's sums since the last reading; times in seconds."""

    compute: float
    wait: float
    data: float
    forward: float
    backward: float
    optimizer: float
    elapsed: float


class Metrics(StepObserver):
    """Sums this rank's losses and times, and gathers those of all ranks every few steps.

    From each reading all ranks derive the step of the next one, so that the steps in between need
    no communication.
    """

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        sinks: Sinks,
        clock: StepClock,
        state: State,
        samples: int,
        logged: dict[str, float],
    ) -> None:
        self._state, self._logged = state, logged
        self._samples_per_epoch = samples
        self._clock = clock
        self.compute_sec = [0.0] * world.size
        self.wait_sec = [0.0] * world.size
        self.steps = 0
        """The number of steps in these sums; both restart at 0 after a recovery."""
        self._config, self._world, self._sinks = config, world, sinks
        # Summed on the losses' device, so that a step does not wait for it.
        self._loss_sum = torch.zeros((), device=world.device)
        self._data_sec = self._compute = self._wait = 0.0
        self._samples = self._steps = 0
        self._batch_sizes: list[int] = []
        self._next_reading = 0
        self._since = time.perf_counter()

    def epoch_begins(self) -> None:
        """Exclude the time since the last reading, which was not spent training."""
        self._since = time.perf_counter()

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Add a step, and read if that is due."""
        self._loss_sum = self._loss_sum + step.mean_loss * step.samples
        self._data_sec += step.data_sec
        self._compute += step.times.computed
        self._wait += step.times.waited
        self._samples += step.samples
        self._batch_sizes = step.batch_sizes
        self._steps += 1
        if self._state.progress.step >= self._next_reading:
            self.epoch_ends()

    def epoch_ends(self) -> None:
        """Gather the ranks' sums, and give them to the sinks."""
        if self._steps == 0:
            return
        progress = self._state.progress
        loss = self._loss_sum.item() / self._samples  # the same on all ranks
        sums = self._gather()
        elapsed = max(each.elapsed for each in sums)
        progress.training_sec += elapsed
        if self._sinks:
            self._sinks.on_reading(self._reading(loss, sums, elapsed))
        steps_between = round(self._config.log_interval * self._steps / elapsed)
        self._next_reading = progress.step + max(1, steps_between)
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._logged.clear()
        self._data_sec = self._compute = self._wait = 0.0
        self._samples = self._steps = 0
        self._since = time.perf_counter()

    def close(self, together: bool) -> None:
        """Give the sinks figures that no reading has taken."""
        if self._logged:
            progress, values = self._state.progress, dict(self._logged)
            step, epoch = progress.step, progress.epoch
            self._sinks.on_logged(Figures(step=step, epoch=epoch, time=time.time(), values=values))
            self._logged.clear()

    def _gather(self) -> list[RankSums]:
        """Return all ranks' sums since the last reading, and add them to those of the run."""
        times = self._clock.take(wait=True)
        compute, wait = self._compute + times.computed, self._wait + times.waited
        phases = self._clock.take_phases()
        own = (compute, wait, self._data_sec, *phases, time.perf_counter() - self._since)
        sleeping_barrier(self._world.comm)
        sums = [RankSums(*values) for values in gather_values(self._world.comm, own)]
        self.steps += self._steps
        for rank, each in enumerate(sums):
            self.compute_sec[rank] += each.compute
            self.wait_sec[rank] += each.wait
        return sums

    def _reading(self, loss: float, sums: Sequence[RankSums], elapsed: float) -> Reading:
        progress, step_sec = self._state.progress, elapsed / self._steps
        phases = {
            f"{name}_time_sec": [getattr(each, name) / self._steps for each in sums]
            for name in RankSums._fields[:-1]
        }
        return Reading(
            step=progress.step,
            total_steps=progress.total_steps,
            epoch=progress.epoch,
            epochs=self._config.epochs,
            epoch_fraction=min(1.0, progress.position / self._samples_per_epoch),
            steps=self._steps,
            time=time.time(),
            loss=loss,
            learning_rate=progress.learning_rate,
            samples_per_sec=self._samples / elapsed,
            step_time_sec=step_sec,
            seconds_left=(progress.total_steps - progress.step) * step_sec,
            ranks=[info.world_rank for info in self._world.infos],
            batch_sizes=self._batch_sizes,
            logged=dict(self._logged),
            **phases,
        )
