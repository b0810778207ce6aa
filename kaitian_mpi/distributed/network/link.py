"""Reductions in host memory over communicators with several hosts: what is fastest is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from mpi4py import MPI

from kaitian_mpi.distributed.network.allreduce import HostAllreduce, Hosts, Route, group_by_host
from kaitian_mpi.distributed.network.crossing import EXCHANGES
from kaitian_mpi.distributed.residual import Residual
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import SUM, Reduction
from kaitian_mpi.mpi.exchange import check_same, time_in_rounds
from kaitian_mpi.mpi.topology import CommunicationSettings, GroupComms, translate_ranks
from kaitian_mpi.observe.timeline import recorder

_log = logging.getLogger(__name__)

_ROUNDS = 4  # the first one warms up
_MAX_SEC = 1.0

Allreduce = Callable[[torch.Tensor, Reduction], None]
"""Reduces a contiguous host tensor, in place. Collective."""

SHORT_BYTES, LONG_BYTES = 256 << 10, 2 << 20
"""The sizes that are measured. Below the first one, MPI's own allreduce is always used."""

MPI_ROUTE = Route("mpi")

# MPI's own allreduce has to be so much faster: it may take twice as long at times, and with longer
# tensors than are measured, and less of it happens while gradients are computed.
_MPI_FACTOR = 0.85

Seconds = Mapping[Route, float]


class RouteChoice(NamedTuple):
    """The route by which tensors are reduced between hosts."""

    route: Route
    """For tensors of `min_bytes` and more; for others, MPI's own allreduce."""
    min_bytes: int = SHORT_BYTES
    seconds: Seconds | None = None
    """The time of each route for a tensor of `LONG_BYTES`; None if nothing was measured."""

    def describe(self) -> str:
        """Describe it in a line, such as `ring (measured, 2 MB: mpi 41.3 ms, ring 23.0 ms)`."""
        if self.seconds is None:
            return str(self.route)
        times = ", ".join(f"{route} {1e3 * sec:.1f} ms" for route, sec in self.seconds.items())
        return f"{self.route} (measured, 2 MB: {times})"


def routes(algorithms: Sequence[str], lanes: int) -> list[Route]:
    """Return the routes to choose from: each algorithm in one lane, and in all of them."""
    counts = sorted({1, lanes})
    return [MPI_ROUTE, *[Route(name, count) for name in algorithms for count in counts]]


def choose(short: Seconds, long: Seconds) -> RouteChoice:
    """Return the fastest route for long tensors, and from which length on.

    MPI's own allreduce is chosen only if it is clearly faster than the others.
    """
    best = min((route for route in long if route != MPI_ROUTE), key=lambda route: long[route])
    if long[MPI_ROUTE] < _MPI_FACTOR * long[best]:
        best = MPI_ROUTE
    is_for_short = short[best] <= short[MPI_ROUTE]
    return RouteChoice(best, SHORT_BYTES if is_for_short else LONG_BYTES // 2, long)


class Link:
    """The reductions over one communicator. Methods are collective, unless they say otherwise."""

    def __init__(self, comm: MPI.Comm, hosts: Hosts, settings: CommunicationSettings) -> None:
        """Measure nothing yet, unless the settings force an exchange. Not collective."""
        self.choice: RouteChoice | None = None
        """The route of tensors, the same on every rank; None if not known yet."""
        self.routes = routes(list(EXCHANGES), min(map(len, hosts)))
        """The routes to choose from."""
        self._comm = comm
        self._hosts = hosts
        self._settings = settings
        self._allreduce = HostAllreduce(comm, hosts)

    def reduce_to_all(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce a contiguous host tensor, in place.

        The first long tensor is preceded by a measurement, if none has been made yet.
        """
        route = self._route_for(tensor)
        if recorder.current is not None:
            recorder.current.annotate(network=str(route))
        self._reduce(tensor, op, route)

    def gradient_sum(self, residual: Residual, start: int) -> Allreduce:
        """Return a function that sums the parts of a buffer, from `start` on, one after the other.

        Only the gradients in it are encoded.
        """
        position = start

        def add_up(part: torch.Tensor, op: Reduction) -> None:
            nonlocal position
            flat = part.view(-1)
            gradients = min(max(0, residual.count - position), flat.numel())
            if gradients:
                if recorder.current is not None:
                    recorder.current.annotate(network="pairwise, encoded")
                self._allreduce.sum_encoded(flat[:gradients], residual, position)
            if gradients < flat.numel():
                self.reduce_to_all(flat[gradients:], op)
            position += flat.numel()

        return add_up

    def choose(self) -> RouteChoice:
        """Return the route of tensors, which is chosen in the first call."""
        if self.choice is None:
            forced = self._settings.network_allreduce
            check_same(self._comm, {"--network-allreduce": forced}, "give every rank the same")
            self.choice = self._measure() if forced == "auto" else RouteChoice(Route(forced))
            if self._comm.rank == 0:
                where = f"{self._comm.size} ranks on {len(self._hosts)} hosts"
                _log.info("allreduce among %s: %s", where, self.choice.describe())
        return self.choice

    def _route_for(self, tensor: torch.Tensor) -> Route:
        if tensor.nbytes < SHORT_BYTES:
            return MPI_ROUTE
        choice = self.choose()
        return choice.route if tensor.nbytes >= choice.min_bytes else MPI_ROUTE

    def _measure(self) -> RouteChoice:
        sizes = SHORT_BYTES, LONG_BYTES
        works = {
            (size, route): partial(self._reduce, tensor, SUM, route)
            for size in sizes
            for tensor in [torch.zeros(size // 4)]
            for route in self.routes
        }
        seconds = time_in_rounds(self._comm, works, _ROUNDS, _MAX_SEC)
        short, long = ({route: seconds[size, route] for route in self.routes} for size in sizes)
        return choose(short, long)

    def _reduce(self, tensor: torch.Tensor, op: Reduction, route: Route) -> None:
        if route == MPI_ROUTE:
            host_collectives.allreduce(self._comm, tensor, op)
        else:
            self._allreduce.run(tensor.view(-1), op, route)


def links_of(
    comms: GroupComms, nodes: Sequence[int], settings: CommunicationSettings
) -> dict[int, Link]:
    """Return the links of a process group's communicators, by handle, given the ranks' hosts.

    Without those whose ranks are on one host. Not collective.
    """
    groupings = [comms] if comms.by_host is None else [comms, comms.by_host]
    links = {}
    for comm in (comms.world, *(grouping.lane for grouping in groupings)):
        if comm is not None:
            places = translate_ranks(cast("MPI.Intracomm", comm), comms.world)
            hosts = group_by_host([nodes[place] for place in places])
            if len(hosts) > 1:
                links[comm.py2f()] = Link(comm, hosts, settings)
    return links
