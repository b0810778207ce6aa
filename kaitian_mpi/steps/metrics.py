"""Collects losses and times of all ranks while training, and writes and prints them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.engine.clock import StepClock, StepTimes
from kaitian_mpi.engine.state import Progress
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import print_rank_0, progress_line
from kaitian_mpi.output.run_folder import RunFolder
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.steps.step import Step


@dataclass(frozen=True)
class Reading:
    """One rank's sums since the last reading; times in seconds."""

    compute: float
    wait: float
    data: float
    elapsed: float


class Metrics:
    """Sums this rank's losses and times, and gathers those of all ranks every few steps.

    From each reading all ranks derive the step of the next one, so that the steps in between need
    no communication.
    """

    def __init__(
        self, config: TrainingConfig, world: World, folder: RunFolder, clock: StepClock
    ) -> None:
        """Start with empty sums.

        Args:
            config: the number of epochs and the seconds between progress lines.
            world: the ranks.
            folder: where metrics.jsonl is written.
            clock: measures this rank's steps.
        """
        self._clock = clock
        self.compute_sec = [0.0] * world.size
        self.wait_sec = [0.0] * world.size
        self.steps = 0
        """The number of steps in these sums; both restart at 0 after a recovery."""
        self._config, self._world, self._folder = config, world, folder
        # Summed on the losses' device, so that a step does not wait for it.
        self._loss_sum = torch.zeros((), device=world.device)
        self._recorded: dict[str, float] = {}
        self._data_sec = self._compute = self._wait = 0.0
        self._samples = self._steps = 0
        self._next_reading = 0
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Exclude the time since the last reading, which was not spent training."""
        self._since = time.perf_counter()

    def observe(self, step: Step, progress: Progress) -> None:
        """Add a step. Collective if a reading is due.

        Args:
            step: this rank's step.
            progress: including this step.
        """
        self._loss_sum = self._loss_sum + step.mean_loss * step.samples
        self._data_sec += step.data_sec
        self._add_times(step.times)
        self._samples += step.samples
        self._steps += 1
        if progress.step >= self._next_reading:
            self.read(progress)

    def read(self, progress: Progress) -> None:
        """Gather the ranks' sums, then write and print them. Collective."""
        if self._steps == 0:
            return
        loss = self._loss_sum.item() / self._samples  # the same on all ranks
        readings = self._gather()
        elapsed = max(reading.elapsed for reading in readings)
        self._add_up(readings)
        progress.training_sec += elapsed
        self._write(progress, loss, readings, elapsed)
        self._show(progress, loss, elapsed)
        steps_between = round(self._config.log_interval * self._steps / elapsed)
        self._next_reading = progress.step + max(1, steps_between)
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._recorded = {}
        self._data_sec = self._compute = self._wait = 0.0
        self._samples = self._steps = 0
        self.restart()

    def record(self, values: Mapping[str, float]) -> None:
        """Add figures to the next line. Not collective."""
        self._recorded.update(values)

    def flush(self, progress: Progress) -> None:
        """Write figures for which no line came any more. Not collective."""
        if self._recorded:
            line = {"step": progress.step, "epoch": progress.epoch, "logged": self._recorded}
            self._folder.append("metrics.jsonl", line)
            self._recorded = {}

    def _add_times(self, times: StepTimes) -> None:
        self._compute += times.computed
        self._wait += times.waited

    def _gather(self) -> list[Reading]:
        self._add_times(self._clock.take(wait=True))
        elapsed = time.perf_counter() - self._since
        own = (self._compute, self._wait, self._data_sec, elapsed)
        sleeping_barrier(self._world.comm)
        return [Reading(*values) for values in gather_values(self._world.comm, own)]

    def _add_up(self, readings: list[Reading]) -> None:
        self.steps += self._steps
        for rank, reading in enumerate(readings):
            self.compute_sec[rank] += reading.compute
            self.wait_sec[rank] += reading.wait

    def _write(
        self, progress: Progress, loss: float, readings: list[Reading], elapsed: float
    ) -> None:
        line = {
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": loss,
            "learning_rate": progress.learning_rate,
            "samples_per_sec": self._samples / elapsed,
            "step_time_sec": elapsed / self._steps,
            "compute_time_sec": [reading.compute / self._steps for reading in readings],
            "wait_time_sec": [reading.wait / self._steps for reading in readings],
            "data_time_sec": [reading.data / self._steps for reading in readings],
        }
        if self._recorded:
            line["logged"] = self._recorded
        self._folder.append("metrics.jsonl", line)

    def _show(self, progress: Progress, loss: float, elapsed: float) -> None:
        line = progress_line(
            epoch=progress.epoch + 1,
            epochs=self._config.epochs,
            step=progress.step,
            steps=progress.total_steps,
            loss=loss,
            rate=self._samples / elapsed,
            left_sec=(progress.total_steps - progress.step) * elapsed / self._steps,
        )
        print_rank_0(
            self._world, " | ".join([line, *(f"{n} {v:.4g}" for n, v in self._recorded.items())])
        )
