"""On which hosts the ranks of a communicator are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """The ranks of a communicator by host."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks on each host, in order; hosts are in the order of their first ranks."""

    @property
    def size(self) -> int:
        """The number of hosts."""
        return len(self.ranks)

    @property
    def lanes(self) -> int:
        """The most ranks that each host can have for exchanging data with the others."""
        return min(map(len, self.ranks))

    def index_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return next(index for index, ranks in enumerate(self.ranks) if rank in ranks)

    def lane(self, number: int) -> tuple[int, ...]:
        """Return the ranks of a lane, one on each host."""
        return tuple(ranks[number] for ranks in self.ranks)


def group_by_host(nodes: Sequence[int]) -> Hosts:
    """Group ranks 0, 1, … by the numbers of their hosts."""
    by_host: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_host.setdefault(node, []).append(rank)
    return Hosts(tuple(map(tuple, by_host.values())))
