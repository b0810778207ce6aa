"""Steps whose gradient is not finite."""

from __future__ import annotations

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.engine.state import Progress
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import say
from kaitian_mpi.output.run_folder import RunFolder
from kaitian_mpi.training.trainer import Step


class BadSteps:
    """Records the steps that all ranks skipped, and ends a run with too many in a row."""

    def __init__(self, config: TrainConfig, world: World, folder: RunFolder) -> None:
        self._config, self._world, self._folder = config, world, folder

    def observe(self, step: Step, progress: Progress, sampler: LoadAdaptiveSampler) -> None:
        """Take in a step that has just been counted.

        Args:
            step: whose gradient was finite, or was not.
            progress: with this step.
            sampler: knows the samples' order.

        Raises:
            AgreedError: too many steps in a row had no finite gradient; on every rank.
        """
        if step.is_finite:
            progress.bad_in_a_row = 0
            return
        progress.bad_steps += 1
        progress.bad_in_a_row += 1
        indices = sampler.indices(progress.position - step.samples, step.samples)
        self._folder.append(
            "bad_steps.jsonl",
            {"step": step.number, "epoch": progress.epoch, "samples": indices},
        )
        say(
            self._world,
            f"step {step.number} is skipped: its gradient is not finite (bad_steps.jsonl lists its "
            "samples)",
        )
        limit = self._config.max_bad_steps
        if limit and progress.bad_in_a_row >= limit:
            raise AgreedError(
                f"found no finite gradient in {limit} steps in a row, the last of them step "
                f"{step.number}; lower --lr, look at the samples in bad_steps.jsonl, or raise "
                "--max-bad-steps"
            )
