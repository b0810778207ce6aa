"""The progress of a run, and its number of steps."""

from __future__ import annotations

from dataclasses import dataclass

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.train.data.sampler import steps_per_epoch


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
    samples: int = 0
    """Samples that are done since the run started."""
    bad_steps: int = 0
    """Steps skipped because their gradient was not finite."""
    consecutive_bad_steps: int = 0
    """The number of them since the last good step."""
    training_sec: float = 0.0
    """Seconds spent training, without benchmarks, evaluations and recoveries."""
    learning_rate: float = 0.0
    is_done: bool = False
    """Whether nothing is left to train, and the final model has been evaluated."""

    @property
    def has_all_steps(self) -> bool:
        """Whether all steps are done, so that only the results may be missing."""
        return self.step >= self.total_steps

    @property
    def steps_applied(self) -> int:
        """Steps that were done and not skipped."""
        return self.step - self.bad_steps

    def step_done(self, samples: int) -> None:
        """Count a step with this many samples over all ranks."""
        self.step += 1
        self.step_in_epoch += 1
        self.position += samples
        self.samples += samples

    def epoch_done(self, epochs: int) -> None:
        """Count an epoch, which is trained and evaluated."""
        self.epoch += 1
        self.step_in_epoch = self.position = 0
        self.is_done = self.epoch >= epochs or self.step >= self.total_steps

    def stopped(self) -> None:
        """Record that the run stops in mid-epoch; with more steps it could continue."""
        self.is_done = True

    def fraction_done(self, config: TrainingConfig, samples: int, epoch_samples: int) -> float:
        """Return how much of the run is done in the middle of the next step, from 0 to 1.

        In the middle, so that neither the first nor the last step has a learning rate of 0.
        Counted in samples, so that a change of the global batch does not move it; or in steps, if
        `--max-steps` ends the run before `--epochs` does.
        """
        fraction = (self.samples + samples / 2) / (config.epochs * epoch_samples)
        if config.max_steps:
            fraction = max(fraction, (self.step + 0.5) / config.max_steps)
        return min(1.0, fraction)


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
    if done.epoch < config.epochs:
        rest = samples - done.position
        left = steps_per_epoch(rest, global_batch_size, min_batch)
        epochs = config.epochs - done.epoch - 1
        left += epochs * steps_per_epoch(samples, global_batch_size, min_batch)
    if config.max_steps:
        left = min(left, max(0, config.max_steps - done.step))
    return done.step + left
