"""What all ranks must know of a step whose gradient no rank has whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from kaitian_mpi.distributed.gradients import check_dense, finite_and_norm, sum_on_host, values_of


class StepFacts:
    """Sums over the ranks what each knows of its part of a step's gradient.

        facts.add_number(loss)
        facts.measure(gradients)
        facts.exchange()

    Attributes:
        number: the sum of the ranks' numbers, such as their losses; float64, without dimensions.
        squared_norm: of the whole gradient.
        is_finite: whether it has no NaN and no infinity.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.number = torch.zeros((), dtype=torch.float64)
        self.squared_norm = 0.0
        self.is_finite = True
        self._measured = True, 0.0
        self._numbers: list[torch.Tensor] = []
        self._weights: list[float] = []

    def add_number(self, number: torch.Tensor, weight: float = 1.0) -> None:
        """Add a number of this rank, of one element, times a weight. Not collective."""
        self._numbers.append(number)
        self._weights.append(weight)

    def forget_numbers(self) -> None:
        """Forget this rank's numbers, such as those of a step that is undone. Not collective."""
        self._numbers = []
        self._weights = []

    def measure(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take the norm of this rank's part of the gradient, which waits for it. Not collective.

        Each gradient is in the part of one rank only.
        """
        check_dense(gradients)
        self._measured = finite_and_norm(gradients)

    def exchange(
        self, counts: Sequence[float] = (), group: dist.ProcessGroup | None = None
    ) -> list[float]:
        """Sum over the ranks of a group; return the sums of the counts. Collective."""
        is_finite, squared_norm = self._measured
        values = values_of(self._numbers)
        number = sum((value * w for value, w in zip(values, self._weights, strict=True)), 0.0)
        facts = number, float(not is_finite), squared_norm
        total = torch.tensor([*facts, *counts], dtype=torch.float64)
        sum_on_host(total, group).wait()
        number, faults, self.squared_norm, *summed = total.tolist()
        self.is_finite = faults == 0
        self.number = torch.tensor(number, dtype=torch.float64)
        self.forget_numbers()
        return summed
