"""Which plan the batches of a script's loaders follow, from when a loader trains a model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.distributed.sync_batch_norm import SyncBatchNorm
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.adaptive_plan import AdaptivePlan
from kaitian_mpi.integrations.loss_weights import Ranks
from kaitian_mpi.integrations.planned_batches import PlannedBatchSampler
from kaitian_mpi.observe.console import print_rank_0


class LoaderPlans:
    """The plans of the loaders that train: one for all loaders of equal batches."""

    def __init__(self, ranks: Ranks) -> None:
        """Start without a plan; `ranks` compare their loaders."""
        self._ranks = ranks
        self._plans: dict[int, AdaptivePlan] = {}  # by the rows of a rank's full batch
        self._sampler: PlannedBatchSampler | None = None  # of the loader that trains

    @property
    def has_begun(self) -> bool:
        """Whether a loader trains."""
        return self._sampler is not None

    def plan_of(self, sampler: PlannedBatchSampler) -> AdaptivePlan:
        """Return the plan that divides a loader's batches; an equal one before it trains."""
        plan = self._plans.get(sampler.rank_rows)
        return plan or AdaptivePlan(sampler.rank_rows, self._ranks.world.infos, min_batch=2)

    def observe(self, steps: RankSteps) -> str:
        """Add the ranks' times of a step to the plan of the loader that trains. Not collective.

        Returns why its shares have changed, and what they are now; "" if they have not.
        """
        if self._sampler is None:
            return ""
        plan = self._plans[self._sampler.rank_rows]
        reason = plan.observe(steps)
        return reason and f"new plan {plan.shares}: {reason}"

    def begin(self, sampler: PlannedBatchSampler, model: nn.Module) -> None:
        """Make a loader that trains this model follow the ranks' speed. Collective if it is new.

        Raises:
            AgreedError: its batches cannot be divided, or the ranks' are unlike.
        """
        if sampler is self._sampler:
            return
        if sampler.refusal:
            raise AgreedError(sampler.refusal)
        sampler.begin_training()
        self._sampler = sampler
        if sampler.rank_rows in self._plans and not sampler.may_end_early:
            return  # such as the loader of another epoch
        rows = self._ranks.gather_at(sampler.position(), sampler.rank_rows)
        if sampler.rank_rows in self._plans:
            return
        if len(set(rows)) > 1:
            raise AgreedError(
                f"--adaptive divides the ranks' batches itself, which are {rows} rows now; "
                "give every rank the same batch size"
            )
        world = self._ranks.world
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        is_synchronized = all(isinstance(norm, SyncBatchNorm) for norm in norms)
        min_batch = 1 if is_synchronized else 2
        self._plans[sampler.rank_rows] = AdaptivePlan(sampler.rank_rows, world.infos, min_batch)
        print_rank_0(
            world,
            f"adaptive: batches of {sampler.rank_rows * world.size} rows over {world.size} ranks "
            "follow the ranks' speed",
        )
