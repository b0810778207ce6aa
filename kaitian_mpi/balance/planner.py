"""Plans the ranks' batch sizes during training: learns the cost of a step, then follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.rebalancer import MAX_GROWTH, NewPlan, RankSteps, Rebalancer

if TYPE_CHECKING:
    from kaitian_mpi.balance.cost_learner import CostLearner


class Planner:
    """Proposes new batch sizes from the times of the ranks' steps.

    A pure function of values that all ranks have exchanged, so every rank arrives at the same plan
    at the same step.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        names: Sequence[object],
        costs: Sequence[RankCost] | None = None,
        min_batch: int = 1,
        ahead: int = 0,
    ) -> None:
        """Start with the batch sizes that the ranks have now.

        Args:
            batch_sizes: samples of each rank in a step.
            names: the ranks' names, used in the reason of a plan.
            costs: the cost of each rank's step; None: learn it from the first steps.
            min_batch: the least number of samples of a rank.
            ahead: the number of steps after which a plan applies.
        """
        self._names = names
        self._min_batch = min_batch
        self._learner: CostLearner | None = None
        self._rebalancer: Rebalancer | None = None
        if costs:
            self._follow(costs, batch_sizes)
        else:
            from kaitian_mpi.balance.cost_learner import CostLearner

            self._learner = CostLearner(batch_sizes, min_batch, ahead)

    @property
    def costs(self) -> list[RankCost] | None:
        """Each rank's cost as estimated from its steps; None while it is learned."""
        return self._rebalancer.costs if self._rebalancer is not None else None

    def observe(self, steps: RankSteps, max_growth: float = MAX_GROWTH) -> NewPlan | None:
        """Add the times of a step; return a new plan whose reason names the rank, or None.

        A batch is at most `max_growth` times any before; infinite for one that is computed in
        micro-batches. Not collective.
        """
        if self._learner is not None:
            return self._learn(self._learner, steps)
        assert self._rebalancer is not None
        plan = self._rebalancer.observe(steps, max_growth)
        if plan is None:
            return None
        return replace(plan, reason=f"{self._names[plan.rank]} {plan.reason}")

    def _learn(self, learner: CostLearner, steps: RankSteps) -> NewPlan | None:
        batch_sizes = learner.observe(steps)
        reason = "learning the cost of a step"
        if learner.costs is not None:
            reason = f"fitted to the first {learner.steps} steps"
            self._follow(learner.costs, learner.batch_sizes)
            self._learner = None
        if batch_sizes is None:
            return None
        factors = [1.0] * len(batch_sizes)
        return NewPlan(batch_sizes, learner.gain, factors, rank=0, reason=reason)

    def _follow(self, costs: Sequence[RankCost], batch_sizes: Sequence[int]) -> None:
        self._rebalancer = Rebalancer(costs, batch_sizes, self._min_batch)
