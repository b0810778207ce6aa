"""What all ranks do after each step: exchange reports, adopt new plans, record metrics."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.bad_steps import BadSteps
from kaitian_mpi.train.data.loader import steps_ahead
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.metrics import Metrics
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.step import Step
from kaitian_mpi.train.step_exchange import StepExchange, StepReports
from kaitian_mpi.train.trainer import Trainer


class StepFollowUp:
    """Handles a trainer's steps on all of its ranks.

    Every method is collective. Use it as a context manager; leaving it by an exception does not
    wait for other ranks.
    """

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        folder: RunFolder,
        trainer: Trainer,
        plan: Plan,
        sinks: Sinks | None = None,
    ) -> None:
        """Start with a plan.

        Args:
            config: the settings.
            world: the ranks.
            folder: where plans and bad steps are written.
            trainer: the trainer whose steps are handled.
            plan: the trainer's initial plan.
            sinks: take the metrics and events; None: nothing does.
        """
        sinks = sinks or Sinks()
        self._trainer = trainer
        most_workers = max(gather_values(world.comm, config.workers))
        self._delay = steps_ahead(most_workers) - steps_ahead(config.workers)
        self._plans: list[tuple[int, list[int]]] = []
        self._exchange = StepExchange(world.comm)
        self._bad_steps = BadSteps(config, world, folder, sinks)
        samples = len(trainer.sampler.dataset)
        self.metrics = Metrics(config, world, sinks, trainer.clock, samples)
        self.balancing = Balancing(
            world,
            folder,
            plan.batch_sizes,
            plan.costs,
            adaptive=config.balance == "adaptive",
            steps_ahead=steps_ahead(most_workers),
            min_batch=plan.min_batch,
            has_micro_batches=trainer.has_micro_batches,
            sinks=sinks,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(together=kind is None)

    def close(self, together: bool = True) -> None:
        """End the exchange of reports; pass `together=False` if a rank may be lost."""
        self._exchange.close(together)

    def step_done(self, step: Step, wants_checkpoint: bool = False) -> bool:
        """Handle a step.

        Args:
            step: the step that the trainer has just done.
            wants_checkpoint: whether this rank requests a checkpoint.

        Returns:
            Whether any rank requested one with its report of the step before; the same on every
            rank.

        Raises:
            AgreedError: too many steps in a row had no finite gradient.
        """
        self._bad_steps.observe(step, self._trainer.progress, self._trainer.sampler)
        reports = self._exchange.swap(step.report(wants_checkpoint))
        if reports is not None:
            self._note_plan(step, reports)
        self._set_plans(step.number)
        self.metrics.observe(step, self._trainer.progress)
        return reports is not None and bool(reports.wants_checkpoint.any())

    def epoch_done(self) -> None:
        """Write the metrics of the steps since the last line; the next epoch has the last plan."""
        self._set_plans(math.inf)
        self.metrics.read(self._trainer.progress)

    def _note_plan(self, step: Step, reports: StepReports) -> None:
        plan = self.balancing.observe(step.number, reports)
        if plan is not None:  # a rank that fetches less far ahead has to wait with it
            self._plans.append((step.number + self._delay, plan))

    def _set_plans(self, step: float) -> None:
        """Give the sampler the plans that are due after a step."""
        while self._plans and self._plans[0][0] <= step:
            self._trainer.sampler.set_plan(self._plans.pop(0)[1])
