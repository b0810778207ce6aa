"""The plan of adaptive batches: each rank's rows, learned from steps and followed after that."""

from __future__ import annotations

from collections.abc import Sequence

from kaitian_mpi.balance.cost_learner import CostLearner
from kaitian_mpi.balance.rebalancer import MAX_GROWTH, RankSteps, Rebalancer
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.mpi.topology import RankInfo


class Plan:
    """How many rows each rank takes of a full batch; equal numbers at first.

    The costs of the ranks are learned from their first steps, and followed after that, as by a
    `Training` without a benchmark.
    """

    def __init__(self, rows: int, infos: Sequence[RankInfo], min_batch: int = 1) -> None:
        """Start with `rows` for each rank, of which none will have fewer than `min_batch`."""
        self.shares = [rows] * len(infos)
        self._infos, self._min_batch = infos, min(min_batch, rows)
        self._learner: CostLearner | None = CostLearner(self.shares, self._min_batch)
        self._rebalancer: Rebalancer | None = None

    def observe(self, steps: RankSteps) -> str:
        """Add the ranks' times of a step; return why the shares have changed, "" if they have not.

        Not collective: ranks that add the same times arrive at the same shares.
        """
        if self._learner is not None:
            shares, reason = self._learner.observe(steps), "learning what a step costs"
            if self._learner.costs is not None:
                reason = f"from what the first {self._learner.steps} steps cost"
                costs, sizes = self._learner.costs, self._learner.batch_sizes
                self._rebalancer = Rebalancer(costs, sizes, self._min_batch, MAX_GROWTH)
                self._learner = None
        else:
            assert self._rebalancer is not None
            plan = self._rebalancer.observe(steps)
            shares = plan.batch_sizes if plan else None
            reason = f"{self._infos[plan.rank]} {plan.reason}" if plan else ""
        if not shares:
            return ""
        self.shares = shares
        return reason

    def divide(self, rows: int) -> list[int]:
        """Return each rank's rows of a batch, in proportion to the shares.

        Each rank has at least one, or as many as a batch norm needs, if there are enough.
        """
        shares = self.shares
        if rows == sum(shares):
            return shares
        if rows < len(shares):
            return [1] * rows + [0] * (len(shares) - rows)
        least = self._min_batch if rows >= self._min_batch * len(shares) else 1
        weights = [share - least for share in shares]
        rest = rows - least * len(shares)
        if not any(weights):
            weights = [1] * len(shares)
        return [least + more for more in apportion(rest, weights)]
