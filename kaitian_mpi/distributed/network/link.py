"""A communicator whose ranks are on several hosts, and how it is reduced: measured once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
from mpi4py import MPI

from kaitian_mpi.distributed.network.allreduce import HostAllreduce
from kaitian_mpi.distributed.network.choice import (
    LONG_BYTES,
    MPI_ROUTE,
    SHORT_BYTES,
    Choice,
    Hosts,
    Route,
    choose,
    routes,
)
from kaitian_mpi.distributed.network.exchanges import EXCHANGES
from kaitian_mpi.distributed.network.residual import Residual
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import SUM, Reduction
from kaitian_mpi.mpi.exchange import check_same, gather_values
from kaitian_mpi.mpi.relay_settings import RelaySettings
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.runtime.polling import sleeping_barrier

_log = logging.getLogger(__name__)

_ROUNDS = 4  # the first one warms up
_MAX_SEC = 1.0

Call = Callable[[torch.Tensor], None]


class Link:
    """How one communicator is reduced. Its methods are collective, unless they say otherwise."""

    def __init__(
        self, comm: MPI.Comm, hosts: Hosts, settings: RelaySettings, same_hosts: Link | None = None
    ) -> None:
        """Measure nothing yet. Not collective.

        The settings may force an exchange; else one that was chosen for `same_hosts`, more ranks of
        the same hosts, is used here.
        """
        self.choice: Choice | None = None
        """How tensors are reduced, the same on every rank; None if not known yet."""
        self.routes = routes(list(EXCHANGES), hosts.lanes)
        """What there is to choose from."""
        self._comm = comm
        self._hosts = hosts
        self._settings = settings
        self._same_hosts = same_hosts
        self._allreduce = HostAllreduce(comm, hosts)

    def reduce_to_all(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce a contiguous host tensor, in place.

        The first long tensor is preceded by a measurement, if none has been made yet.
        """
        route = self._route_for(tensor)
        if recorder.current is not None:
            recorder.current.annotate(network=str(route))
        if route == MPI_ROUTE:
            host_collectives.allreduce(self._comm, tensor, op)
        else:
            self._allreduce.run(tensor.view(-1), op, route)

    def gradient_sum(
        self, residual: Residual, start: int
    ) -> Callable[[torch.Tensor, Reduction], None]:
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

    def choose(self) -> Choice:
        """Return how tensors are reduced; it is chosen in the first call."""
        if self.choice is None and self._same_hosts is not None:
            known = self._same_hosts.choice
            if known is not None and known.route != MPI_ROUTE:  # MPI does not know these are fewer
                self.choice = known.with_lanes(self._hosts.lanes)
        if self.choice is None:
            forced = self._settings.network_allreduce
            check_same(self._comm, {"--network-allreduce": forced}, "give every rank the same")
            self.choice = self._measure() if forced == "auto" else Choice(Route(forced))
            if self._comm.rank == 0:
                where = f"{self._comm.size} ranks on {self._hosts.size} hosts"
                _log.info("allreduce among %s: %s", where, self.choice.describe())
        return self.choice

    def _route_for(self, tensor: torch.Tensor) -> Route:
        if tensor.nbytes < SHORT_BYTES:
            return MPI_ROUTE
        choice = self.choose()
        return choice.route if tensor.nbytes >= choice.min_bytes else MPI_ROUTE

    def _measure(self) -> Choice:
        """Time all routes, for about a second at most, and choose."""
        calls = {route: self._call(route) for route in self.routes}
        sizes = SHORT_BYTES, LONG_BYTES
        times: dict[tuple[int, Route], list[float]] = {}
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            # All routes in each round, so that a temporary load affects all of them.
            for size in sizes:
                for route, seconds in self._time(calls, size).items():
                    times.setdefault((size, route), []).append(seconds)
            # The same decision on every rank.
            if max(gather_values(self._comm, time.perf_counter() - began)) > _MAX_SEC:
                break
        own = [median(seconds[1:] or seconds) for seconds in times.values()]
        slowest = [max(each) for each in zip(*gather_values(self._comm, own), strict=True)]
        found = dict(zip(times, slowest, strict=True))
        short, long = ({route: found[size, route] for route in calls} for size in sizes)
        return choose(short, long)

    def _time(self, calls: Mapping[Route, Call], size: int) -> dict[Route, float]:
        """Return this rank's seconds for a tensor of so many bytes."""
        tensor = torch.zeros(size // 4)
        seconds = {}
        for route, call in calls.items():
            sleeping_barrier(self._comm)
            start = time.perf_counter()
            call(tensor)
            seconds[route] = time.perf_counter() - start
        return seconds

    def _call(self, route: Route) -> Call:
        if route == MPI_ROUTE:
            return partial(host_collectives.allreduce, self._comm)
        return partial(self._allreduce.run, op=SUM, route=route)
