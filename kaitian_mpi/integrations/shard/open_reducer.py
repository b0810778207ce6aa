"""Sums the gradients of any number of backwards to their owners."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from kaitian_mpi.distributed.shard_reducer import ShardReducer


class OpenReducer(ShardReducer):
    """Adds up backwards at the owners until the script clears the gradients.

    A trainer says neither how many backwards a step has nor when it begins: each backward adds to
    what the owners have of those before.

        reducer.begin(weight, cleared)
        loss.backward()
        reducer.complete(is_last, check)
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begin_step(sys.maxsize)
        self._used = [0.0] * len(self._layout.numbers)
        self._has_sum: set[int] = set()  # buckets that have sums of earlier backwards
        self._is_complete = True

    @property
    def numbers(self) -> set[int]:
        """The numbers of the parameters whose gradients it sums."""
        return set(self._layout.numbers)

    @property
    def is_armed(self) -> bool:
        """Whether a backward is being added."""
        return self._arrivals.is_armed

    @property
    def is_complete(self) -> bool:
        """Whether the last backward was completed as the last one of a step."""
        return self._is_complete

    def numbers_used(self) -> set[int]:
        """Return the numbers of the parameters that may have a gradient; the same on every rank.

        These are those of which some rank has one, but all until the sums are complete: no rank
        knows before which gradients the others have.
        """
        pairs = zip(self._layout.numbers, self._used, strict=True)
        return {number for number, count in pairs if count > 0 or not self._is_complete}

    def gradients(self, number: int) -> list[torch.Tensor]:
        """Return what this rank has of the sum of a gradient, before the sums are complete."""
        self._sums.wait()
        return [
            gradient
            for index in self._has_sum
            for part, gradient in self._layout.buckets[index].gradients.items()
            if part.parameter == number
        ]

    def keep(self, numbers: Collection[int]) -> None:
        """Add to the gradients that the targets have, of these parameters. Not collective."""
        self._used = [float(number in numbers) for number in self._layout.numbers]
        for index, bucket in enumerate(self._layout.buckets):
            if not any(part.parameter in numbers for part in bucket.gradients):
                continue
            self._has_sum.add(index)
            for part, gradient in bucket.gradients.items():
                target_gradient = self._targets[part].grad if part.parameter in numbers else None
                if target_gradient is None:
                    gradient.zero_()
                else:
                    self._targets[part].grad = gradient.copy_(target_gradient)

    def begin(self, weight: float, cleared: Collection[int]) -> None:
        """Let the next backward add to the owners' sums. Not collective.

        Args:
            weight: what this rank's gradients are multiplied by.
            cleared: the numbers of the parameters whose gradients the script has cleared since the
                last backward, the same on every rank.
        """
        for index, number in enumerate(self._layout.numbers):
            if number in cleared:
                self._used[index] = 0.0
        for number, bucket in enumerate(self._layout.buckets):
            parts = [part for part in bucket.gradients if part.parameter in cleared]
            if parts and number in self._has_sum:
                self._sums.wait()  # what is still being summed belongs to what was cleared
            if len(parts) == len(bucket.gradients):
                self._has_sum.discard(number)
            for part in parts:
                self._targets[part].grad = None
                if number in self._has_sum:
                    bucket.gradients[part].zero_()
        self.arm(weight)

    def complete(self, is_last: bool, check: Callable[[], None]) -> None:
        """Complete the backward; if it `is_last`, give the sums to the optimizers. Collective.

        Calls `check` before it waits for the last sums.
        """
        if is_last:
            self.values.check_all_seen()
        self.end_round()
        self._is_complete = is_last
        if is_last:
            check()
            self._sums.wait()
            self._settle()
            self.reset()

    def _begin_sums(self) -> None:
        """Keep what earlier backwards have used, until it is cleared."""

    def _set_gradients(self, used: Sequence[float]) -> None:
        self._used = [float(count > 0) for count in used]
        super()._set_gradients(used)

    def _adds(self, number: int) -> bool:
        adds = number in self._has_sum
        self._has_sum.add(number)
        return adds
