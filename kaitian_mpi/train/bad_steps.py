"""Handles steps whose gradient is not finite."""

from __future__ import annotations

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import warn_rank_0
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.step import Step


class BadSteps:
    """Records skipped steps, and ends the run after too many in a row."""

    def __init__(
        self, config: TrainingConfig, world: World, folder: RunFolder, sinks: Sinks
    ) -> None:
        self._config, self._world, self._folder, self._sinks = config, world, folder, sinks

    def observe(self, step: Step, progress: Progress, sampler: LoadAdaptiveSampler) -> None:
        """Handle a step that has just been done.

        Args:
            step: the step.
            progress: including this step.
            sampler: gives the indices of the step's samples.

        Raises:
            AgreedError: too many steps in a row had no finite gradient; raised on every rank.
        """
        if step.is_finite:
            progress.consecutive_bad_steps = 0
            return
        progress.bad_steps += 1
        progress.consecutive_bad_steps += 1
        indices = sampler.indices(progress.position - step.samples, step.samples)
        self._folder.append(
            "bad_steps.jsonl",
            {"step": step.number, "epoch": progress.epoch, "samples": indices},
        )
        text = (
            f"step {step.number} is skipped: its gradient is not finite (bad_steps.jsonl lists its "
            "samples)"
        )
        warn_rank_0(self._world, text)
        self._sinks.event("bad_step", step.number, text)
        limit = self._config.max_bad_steps
        if limit and progress.consecutive_bad_steps >= limit:
            raise AgreedError(
                f"found no finite gradient in {limit} steps in a row, the last of them step "
                f"{step.number}; lower --lr, look at the samples in bad_steps.jsonl, or raise "
                "--max-bad-steps"
            )
