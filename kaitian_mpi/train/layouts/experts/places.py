"""Which rank holds which experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kaitian_mpi.distributed.experts import Experts


class ExpertPlaces:
    """Which rank holds each expert, and the order in which the experts' rows are sent.

    Rows are sorted by the rank that holds their expert, then by the expert's number.
    """

    def __init__(
        self,
        mixtures: Mapping[str, Experts],
        owners: Sequence[Sequence[int]],
        size: int,
        device: torch.device,
    ) -> None:
        """Take the mixtures by name, and the rank of each one's experts, of `size` ranks."""
        self.mixtures = list(mixtures.values())
        self._names = list(mixtures)
        self._numbers = {mixture: number for number, mixture in enumerate(self.mixtures)}
        self.most_experts = max(map(len, owners))
        """The number of experts of the mixture with the most."""
        self._held = [
            [[e for e, owner in enumerate(ranks) if owner == rank] for rank in range(size)]
            for ranks in owners
        ]
        self._orders = [[e for experts in by_rank for e in experts] for by_rank in self._held]
        self._places = [torch.tensor(order).argsort().to(device) for order in self._orders]

    def number_of(self, experts: Experts) -> int:
        """Return the number of a mixture."""
        return self._numbers[experts]

    def name(self, mixture: int) -> str:
        """Return the name of a mixture in the model."""
        return self._names[mixture] or "the model"

    def held(self, mixture: int) -> list[list[int]]:
        """Return a mixture's experts by the rank that holds them."""
        return self._held[mixture]

    def order(self, experts: Experts) -> list[int]:
        """Return a mixture's experts in the order of their rows."""
        return self._orders[self._numbers[experts]]

    def places(self, experts: Experts) -> torch.Tensor:
        """Return each expert's place in `order`, as a tensor on this rank's device."""
        return self._places[self._numbers[experts]]
