"""Gathers sharded parameters in a script that may use them in any order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from kaitian_mpi.distributed.gathering import BUCKET, GatheredRun, Gathering
from kaitian_mpi.integrations.shard.script_parameters import ScriptParameters

_COMPARED_ROUNDS = 3  # ranks whose orders differ for so long will not agree later


class OpenGathering(Gathering):
    """Gathers in an order that ranks have in common, and reads from owners what is not in it.

    In the first rounds each rank notes what it uses. If the ranks have used the same, they gather
    it together from then on, and the next parameters while one computes with others. A rank that
    uses another one reads that from its owners, and joins the others' gathers when it sums
    gradients. So it reads what the script has changed since it was gathered.
    """

    def __init__(
        self,
        model: ScriptParameters,
        *args: Any,
        read_version: Callable[[int], Any],
        **options: Any,
    ) -> None:
        """Gather as `Gathering` does.

        `read_version` returns a value that differs after each change of a parameter.
        """
        super().__init__(model, *args, **options)
        self._read = model.read
        self._read_version = read_version
        self._compared_rounds = 0

    def unshard(self, number: int) -> torch.Tensor:
        """Return a parameter's values. Not collective if it is not the next in order."""
        if self._order is None:
            self._recorded.append(number)
            return self._read(number)
        if self._next() != number:
            return self._read(number)
        self._place += 1
        return self._gather_next(number)

    def next_bucket(self) -> None:
        """Note that a bucket's gradients are summed next, and join the gathers before it."""
        if self._order is None:
            self._recorded.append(BUCKET)
            return
        self._join_until_bucket()

    def complete(self, sum_bucket: Callable[[], None]) -> None:
        """Join the collectives that other ranks still need in this round."""
        if self._order is not None:
            while self._join_until_bucket():
                sum_bucket()

    def end_round(self) -> None:
        """End a round that all ranks have completed; the first ones compare their orders."""
        if self._order is None and self._compared_rounds < _COMPARED_ROUNDS:
            self._compared_rounds += 1
            orders = self._exchange(json.dumps(self._recorded))
            if len(set(orders)) == 1:
                self._agree_on(self._recorded)
        self._recorded = []
        self._rewind()

    def version(self, number: int) -> Any:
        """Return a value that differs after each change of the parameter."""
        return self._read_version(number)

    def _take(self, run: GatheredRun, number: int) -> torch.Tensor:
        values = super()._take(run, number)
        return values if run.versions[number] == self._read_version(number) else self._read(number)

    def _next(self) -> int | None:
        assert self._order is not None
        return self._order[self._place] if self._place < len(self._order) else None

    def _join_until_bucket(self) -> bool:
        """Join what the other ranks gather before the next bucket; return whether there is one."""
        while (number := self._next()) is not None:
            self._place += 1
            if number == BUCKET:
                return True
            self._gather_next(number)
        return False
