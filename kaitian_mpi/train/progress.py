"""The progress of a run, its number of steps, the time left, and the learning rate schedules."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.sampler import steps_per_epoch
from kaitian_mpi.train.state_transfer import plain
from kaitian_mpi.train.task import Task

_MIN_STEPS = 3  # before the time left is estimated
_WARM_UP_STEPS = 1
_WINDOW_SEC = 60.0


@dataclass
class Progress:
    """The progress of the run; the same on every rank."""

    total_steps: int
    """Steps of the whole run: those done, and those left with the current batch sizes."""
    epoch: int = 0
    """Epochs that are trained and evaluated."""
    step: int = 0
    """Steps that are done."""
    step_in_epoch: int = 0
    """Steps that are done in the current epoch."""
    position: int = 0
    """Samples that are done in the current epoch."""
    epoch_is_over: bool = False
    """Whether the script is between this epoch and the next, with `Training.epochs`."""
    script_is_done: bool = False
    """Whether it has gone on from there, so that only the engine's part is missing."""
    evaluated: dict[str, float] | None = None
    """The means of the script's evaluation since then; None if it has not evaluated."""
    samples: int = 0
    """Samples that are done since the run started."""
    bad_steps: int = 0
    """Steps skipped because their gradient was not finite."""
    consecutive_bad_steps: int = 0
    """The number of them since the last good step."""
    training_sec: float = 0.0
    """Seconds spent training, without benchmarks, evaluations and recoveries."""
    timed_steps: int = 0
    """Steps done in these seconds; after a resume or a loss, some steps have not been timed."""
    timed_samples: int = 0
    """Samples of these steps."""
    learning_rate: float = 0.0
    is_done: bool = False
    """Whether nothing is left to train, and the final model has been evaluated."""

    @property
    def has_all_steps(self) -> bool:
        """Whether all steps are done, so that only the results may be missing."""
        return self.step >= self.total_steps

    @property
    def lacks_results(self) -> bool:
        """Whether the last epoch is counted, and its results were lost."""
        return self.has_all_steps and not (self.position or self.is_done)

    @property
    def samples_per_sec(self) -> float | None:
        """The mean over the steps that were timed; None without any."""
        return self.timed_samples / self.training_sec if self.timed_steps else None

    @property
    def step_time_sec(self) -> float | None:
        """The mean over the steps that were timed; None without any."""
        return self.training_sec / self.timed_steps if self.timed_steps else None

    def step_done(self, samples: int) -> None:
        self.step += 1
        self.step_in_epoch += 1
        self.position += samples
        self.samples += samples

    def epoch_done(self, epochs: int) -> None:
        """Count an epoch, which is trained and evaluated."""
        self.epoch += 1
        self.step_in_epoch = self.position = 0
        self.epoch_is_over = self.script_is_done = False
        self.evaluated = None
        self.is_done = self.epoch >= epochs or self.has_all_steps

    def fraction_done(self, config: TrainingConfig, samples: int, epoch_samples: int) -> float:
        """Return how much of the run is done in the middle of the next step, from 0 to 1.

        In the middle, so that neither the first nor the last step has a learning rate of 0.
        Counted in samples, so that a change of the global batch does not move it; or in steps, if
        `--max-steps` ends the run before `--epochs` does.
        """
        fraction = (self.samples + samples / 2) / (most_epochs(config) * epoch_samples)
        if config.max_steps:
            fraction = max(fraction, (self.step + 0.5) / config.max_steps)
        return min(1.0, fraction)


def most_epochs(config: TrainingConfig) -> int:
    """Return the epochs after which training ends, if --max-steps does not end it before."""
    return config.epochs or config.max_steps  # an epoch has at least one step


def count_steps(
    config: TrainingConfig,
    samples: int,
    global_batch_size: int,
    min_batch: int = 1,
    progress: Progress | None = None,
) -> int:
    """Return the steps of a whole run of so many samples an epoch: those done and those left."""
    done = progress or Progress(0)
    left = 0
    epochs = most_epochs(config) - done.epoch
    if epochs > 0:
        left = steps_per_epoch(samples - done.position, global_batch_size, min_batch)
        left += (epochs - 1) * steps_per_epoch(samples, global_batch_size, min_batch)
    if config.max_steps:
        left = min(left, max(0, config.max_steps - done.step))
    return done.step + left


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


class Schedules:
    """The schedulers of a task's optimizers.

    Attributes:
        schedulers: as the task's function returned them.
        begun_with: the settings that they began with, as text.
    """

    def __init__(self, task: Task, optimizers: Sequence[Optimizer], total_steps: int) -> None:
        self._task = task
        self._optimizers = list(optimizers)
        self._own_settings = self.settings()
        self._make(total_steps)

    def follow(self, progress: Progress) -> None:
        """Begin again the schedules that depend on the steps of the whole run, if these change."""
        if self._told_steps not in (None, progress.total_steps):
            self.restart(progress)

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each of the optimizers' groups, without its parameters."""
        return [_settings(group) for group in self._groups]

    def states(self) -> list[dict[str, Any]]:
        """Return the schedulers' states; {} for one that has none."""
        return [
            plain(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else {}
            for scheduler in self.schedulers
        ]

    def resume(
        self, state: dict[str, Any], settings: Sequence[dict[str, Any]], progress: Progress
    ) -> None:
        """Continue another job's schedules, as in its `State.shared`.

        `settings` are this job's, before the optimizers were loaded; they are kept, unless
        schedulers with a state of their own, or the script, have changed them.
        """
        if not self.schedulers:
            begun_with, *_ = json.loads(state["begun_with"])
            for group, setting, first in zip(self._groups, settings, begun_with, strict=False):
                same = (n for n in setting if _text(group.get(n)) == _text(first.get(n)))
                group.update({name: setting[name] for name in same})
        elif not any(self.states()):
            for group, setting in zip(self._groups, settings, strict=True):
                group.update(setting)
        elif state["begun_with"] == self.begun_with:
            for scheduler, content in zip(self.schedulers, state["schedulers"], strict=False):
                if content and hasattr(scheduler, "load_state_dict"):
                    scheduler.load_state_dict(content)
        else:
            self.restart(progress)

    def restart(self, progress: Progress) -> None:
        """Begin again with this job's settings, and make the steps that are done."""
        steps = progress.step - progress.bad_steps
        total_steps = max(progress.total_steps, progress.step)
        for group, setting in zip(self._groups, self._own_settings, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **_settings(setting)})
        self._make(total_steps)
        stepped = [scheduler for scheduler in self.schedulers if hasattr(scheduler, "step")]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's: the optimizer has made no step yet
                for _ in range(steps):
                    for scheduler in stepped:
                        scheduler.step()
        except Exception as error:  # of the user's objects, which may raise anything
            raise UserError(
                f"Task: the scheduler cannot continue at step {steps} of {total_steps} "
                f"({type(error).__name__}: {error}); make it for the steps that it is given"
            ) from error

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _make(self, total_steps: int) -> None:
        self.schedulers = self._task.make_schedulers(self._optimizers, total_steps)
        self._told_steps = total_steps if self._task.tells_steps else None
        self.begun_with = _text((self._own_settings, self.states(), self._told_steps))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value  # changed in place
        for name, value in group.items()
        if name != "params"
    }


def _text(value: object) -> str:
    return json.dumps(value, default=_as_json, skipkeys=True)


def _as_json(value: object) -> object:
    if isinstance(value, torch.Tensor | np.generic):
        return value.tolist()
    return type(value).__qualname__
