"""The plan of adaptive batches: each rank's rows, from the times of the ranks' steps."""

from __future__ import annotations

from collections.abc import Sequence

from kaitian_mpi.balance.planner import Planner
from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.mpi.topology import RankInfo


class AdaptivePlan:
    """The number of rows that each rank takes of a full batch; equal at first.

    The costs of the ranks are learned from their first steps, and followed after that, as by a
    `Training` without a benchmark.
    """

    def __init__(self, rows: int, infos: Sequence[RankInfo], min_batch: int = 1) -> None:
        """Start with `rows` for each rank; none will have fewer than `min_batch`."""
        self.shares = [rows] * len(infos)
        self.min_batch = min(min_batch, rows)
        """The fewest rows of a rank, if there are enough."""
        self._planner = Planner(self.shares, infos, min_batch=self.min_batch)

    def observe(self, steps: RankSteps) -> str:
        """Add the ranks' times of a step; return why the shares have changed, "" if they have not.

        Not collective: ranks that add the same times arrive at the same shares.
        """
        plan = self._planner.observe(steps)
        if plan is None:
            return ""
        self.shares = plan.batch_sizes
        return plan.reason

    def divide(self, rows: int) -> list[int]:
        """Return each rank's rows of a batch, as `divide_rows` does."""
        return divide_rows(self.shares, self.min_batch, rows)


def divide_rows(shares: list[int], min_batch: int, rows: int) -> list[int]:
    """Return each rank's rows of a batch, in proportion to the shares.

    Each rank has at least one, or as many as a batch norm needs, if there are enough.
    """
    if rows == sum(shares):
        return shares
    if rows < len(shares):
        return [1] * rows + [0] * (len(shares) - rows)
    least = min_batch if rows >= min_batch * len(shares) else 1
    weights = [share - least for share in shares]
    rest = rows - least * len(shares)
    if not any(weights):
        weights = [1] * len(shares)
    return [least + more for more in apportion(rest, weights)]
