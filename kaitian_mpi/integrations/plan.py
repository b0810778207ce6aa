"""The plan of adaptive batches: each rank's rows, from the times of the ranks' steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kaitian_mpi.balance.cost_learner import CostLearner
from kaitian_mpi.balance.rebalancer import MAX_GROWTH, RankSteps, Rebalancer
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.runtime.polling import wait_request

if TYPE_CHECKING:
    from mpi4py import MPI


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


class _Timed(NamedTuple):
    """When a step began, had its gradients computed, and had them summed."""

    begin: Mark
    ready: Mark
    end: Mark
    waits: list[tuple[Mark, Mark]]
    """When it waited for other ranks before its gradients were computed."""


class StepTimes:
    """Times each step of this rank, and exchanges the times while the next one begins.

    A step begins when the gradients of the one before are summed.
    """

    def __init__(self, comm: MPI.Intracomm, mark: Callable[[], Mark]) -> None:
        """Exchange times over `comm`, by marks of this rank's device."""
        self._comm, self._mark = comm, mark
        self.steps = self.batches = 0
        """The steps so far, and the batches since the last one, several if they are accumulated."""
        self._marks: list[Mark] = []  # of this step: its begin, and when its gradients are computed
        self._waits: list[tuple[Mark, Mark]] = []  # of this step, before that
        self._timed: deque[_Timed] = deque()
        self._exchange: tuple[Any, np.ndarray, np.ndarray] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Take no time in the block for computation: it waits for other ranks."""
        begin = self._mark()
        yield
        self._waits.append((begin, self._mark()))

    def computed(self) -> None:
        """Take note that this rank's gradients of the step are computed."""
        self._marks.append(self._mark())

    def summed(self, rows: int) -> None:
        """Start to exchange the times of a step whose gradients are summed. Collective.

        Args:
            rows: how many rows this rank's last batch has.
        """
        end, self._marks = self._mark(), self._marks[-2:]
        self.steps += 1
        batches, self.batches = max(self.batches, 1), 0
        if len(self._marks) == 2:  # not in the first step, whose begin is not known
            self._timed.append(_Timed(self._marks[0], self._marks[1], end, self._waits))
            self._send(batches, rows)
        self._marks, self._waits = [end], []

    def _send(self, batches: int, rows: int) -> None:
        steps, computed, waited = 0, 0.0, 0.0
        while self._timed and self._timed[0].end.is_reached():
            step = self._timed.popleft()
            steps += 1
            in_backward = sum(end.seconds_since(begin) for begin, end in step.waits)
            computed += step.ready.seconds_since(step.begin) - in_backward
            waited += step.end.seconds_since(step.ready) + in_backward
        per_batch = 1 / (max(steps, 1) * batches)
        self.receive()
        own = np.array([steps, rows, computed * per_batch, waited * per_batch])
        found = np.empty((self._comm.size, len(own)))
        self._exchange = self._comm.Iallgather(own, found), own, found

    def receive(self) -> RankSteps | None:
        """Return what the ranks have exchanged since the last call, if anything. Collective."""
        if self._exchange is None:
            return None
        (request, _, found), self._exchange = self._exchange, None
        wait_request(request)
        steps, samples = found[:, :2].astype(int).T
        return RankSteps(steps, samples, found[:, 2], found[:, 3])
