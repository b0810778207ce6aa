"""Steps whose gradient is not finite."""

from __future__ import annotations

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.engine.state import Progress
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import say
from kaitian_mpi.output.run_folder import RunFolder


class BadSteps:
    """Tells of steps that were left out, by all ranks together, and ends a run of too many."""

    def __init__(self, config: TrainConfig, world: World, folder: RunFolder) -> None:
        self._config, self._world, self._folder = config, world, folder

    def observe(
        self, progress: Progress, is_finite: bool, sampler: LoadAdaptiveSampler, samples: int
    ) -> None:
        """Take in a step that has just been counted.

        Args:
            progress: with this step.
            is_finite: whether its gradient was.
            sampler: knows the samples' order.
            samples: of the step, over all ranks.

        Raises:
            AgreedError: so many steps in a row had none; on every rank.
        """
        if is_finite:
            progress.bad_in_a_row = 0
            return
        progress.bad_steps += 1
        progress.bad_in_a_row += 1
        indices = sampler.indices(progress.position - samples, samples)
        self._folder.append(
            "bad_steps.jsonl",
            {"step": progress.step, "epoch": progress.epoch, "samples": indices},
        )
        say(
            self._world,
            f"step {progress.step} is left out: its gradient is not finite (bad_steps.jsonl has "
            f"its samples)",
        )
        limit = self._config.max_bad_steps
        if limit and progress.bad_in_a_row >= limit:
            raise AgreedError(
                f"found no finite gradient in {limit} steps in a row, the last of them step "
                f"{progress.step}; lower --lr, look at the samples in bad_steps.jsonl, or raise "
                "--max-bad-steps"
            )
