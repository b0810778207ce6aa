"""On which hosts ranks are, and which way tensors are reduced between them by what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Hosts:
    """The ranks of a communicator by host."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks on each host, in order; hosts are in the order of their first ranks."""

    @property
    def size(self) -> int:
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


SHORT_BYTES, LONG_BYTES = 256 << 10, 2 << 20
"""The sizes that are measured. Below the first one, MPI's own allreduce is always used."""


class Route(NamedTuple):
    """A way to reduce tensors between hosts."""

    algorithm: str
    """`mpi` for MPI's own allreduce among all ranks, or an algorithm's name."""
    lanes: int = 1
    """How many ranks of each host exchange data with other hosts."""

    def __str__(self) -> str:
        return self.algorithm + (f" in {self.lanes} lanes" if self.lanes > 1 else "")


MPI_ROUTE = Route("mpi")

# MPI's own allreduce has to be so much faster: it may take twice as long at times, and with longer
# tensors than are measured, and less of it happens while gradients are computed.
_MPI_FACTOR = 0.85

Seconds = Mapping[Route, float]


class Choice(NamedTuple):
    """How tensors are reduced between hosts."""

    route: Route
    """For tensors of `min_bytes` and more; for others, MPI's own allreduce."""
    min_bytes: int = SHORT_BYTES
    seconds: Seconds | None = None
    """What each route takes for a tensor of `LONG_BYTES`; None if nothing was measured."""

    def describe(self) -> str:
        """Describe it in a line, such as `ring (measured, 2 MB: mpi 41.3 ms, ring 23.0 ms)`."""
        if self.seconds is None:
            return str(self.route)
        times = ", ".join(f"{route} {1e3 * sec:.1f} ms" for route, sec in self.seconds.items())
        return f"{self.route} (measured, 2 MB: {times})"


def routes(algorithms: Sequence[str], lanes: int) -> list[Route]:
    """Return what there is to choose from: each algorithm in one lane, and in all of them."""
    counts = sorted({1, lanes})
    return [MPI_ROUTE, *[Route(name, count) for name in algorithms for count in counts]]


def choose(short: Seconds, long: Seconds) -> Choice:
    """Return the fastest route for long tensors, and from which length on.

    MPI's own allreduce is chosen only if it is clearly faster than the others.

    Args:
        short: the seconds for tensors of `SHORT_BYTES`, by route.
        long: the seconds for tensors of `LONG_BYTES`, by route.
    """
    best = min((route for route in long if route != MPI_ROUTE), key=lambda route: long[route])
    if long[MPI_ROUTE] < _MPI_FACTOR * long[best]:
        best = MPI_ROUTE
    is_for_short = short[best] <= short[MPI_ROUTE]
    return Choice(best, SHORT_BYTES if is_for_short else LONG_BYTES // 2, long)
