"""Process groups of the ranks that have the same parameters, in a layout that divides the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.distributed.gradients import Bucket, group_into_buckets

_BUCKET_BYTES = 8 << 20


class ParameterGroup(NamedTuple):
    """A process group, and the parameters that its ranks share."""

    group: Any
    ranks: tuple[int, ...]
    """As the layout orders them, such as the owner and then its mirror."""
    numbers: list[int]

    def exchange_gradients(
        self,
        targets: Mapping[int, nn.Parameter],
        weight: float | None,
        exchange: Callable[[torch.Tensor], Any],
    ) -> None:
        """Exchange the gradients of the shared parameters, in buckets. Collective over the group.

        Args:
            targets: this rank's parameters, by number.
            weight: what this rank's gradients are multiplied by before; None: it has none.
            exchange: changes a buffer of gradients in place, alike on all ranks.
        """
        parameters = [targets[n] for n in self.numbers if targets[n].requires_grad]
        for indices in group_into_buckets(parameters, (_BUCKET_BYTES, _BUCKET_BYTES)):
            bucket = Bucket({index: parameters[index] for index in indices})
            bucket.fill(weight)
            exchange(bucket.gradients)
            bucket.settle()


class ParameterGroups:
    """This rank's groups; a rank may be in several."""

    def __init__(self, ranks_of: Iterable[tuple[int, tuple[int, ...]]], rank: int) -> None:
        """Make a group of each set of ranks that share parameters. Collective over all ranks.

        Args:
            ranks_of: each parameter's number with the ranks that have it, alike on every rank.
            rank: this one.
        """
        shared: dict[tuple[int, ...], list[int]] = {}
        for number, ranks in ranks_of:
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(number)
        self._groups: list[ParameterGroup] = []
        for ranks, numbers in shared.items():
            group = dist.new_group(sorted(ranks))
            if rank in ranks:
                self._groups.append(ParameterGroup(group, ranks, numbers))

    def __iter__(self) -> Iterator[ParameterGroup]:
        """Return the groups in the order in which they were made, which all ranks share."""
        return iter(self._groups)

    def close(self) -> None:
        """End the groups. Not collective."""
        for group, *_ in self._groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups = []
