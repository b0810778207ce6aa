"""Reductions in host memory over the communicators of one process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from kaitian_mpi.distributed.network.choice import group_by_host
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.topology import translate_ranks

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from kaitian_mpi.distributed.network.link import Link
    from kaitian_mpi.distributed.network.residual import Residual
    from kaitian_mpi.mpi.datatypes import Reduction
    from kaitian_mpi.mpi.relay_settings import RelaySettings
    from kaitian_mpi.mpi.topology import GroupComms


class Network:
    """The links between hosts of one process group; within a host, MPI's own allreduce is used."""

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}

    def add(
        self,
        comm: MPI.Comm,
        nodes: Sequence[int],
        settings: RelaySettings,
        same_hosts: Link | None = None,
    ) -> None:
        """Add a communicator of the process group, given the host of each rank. Not collective."""
        hosts = group_by_host(nodes)
        if hosts.size > 1:
            from kaitian_mpi.distributed.network.link import Link  # on one host nothing needs it

            self._links[comm.py2f()] = Link(comm, hosts, settings, same_hosts)

    def link(self, comm: MPI.Comm) -> Link | None:
        """Return the link of a communicator; None if its ranks are on one host."""
        return self._links.get(comm.py2f())

    def allreduce_on(
        self, comm: MPI.Comm, residual: Residual | None = None, start: int = 0
    ) -> Callable[[torch.Tensor, Reduction], None]:
        """Return a collective function that reduces contiguous host tensors over `comm`, in place.

        Args:
            comm: the ranks.
            residual: of a buffer of gradients that is reduced part by part; None: of anything else.
            start: where in the buffer the first part begins.
        """
        link = self.link(comm)
        if link is None:
            return partial(host_collectives.allreduce, comm)
        return link.reduce_to_all if residual is None else link.gradient_sum(residual, start)


def network_of(comms: GroupComms, nodes: Sequence[int], settings: RelaySettings) -> Network:
    """Return the network of a process group, given the host of each rank. Not collective."""
    network = Network()
    network.add(comms.world, nodes, settings)
    world = network.link(comms.world)
    for grouping in (comms, comms.by_host):
        if grouping is not None and grouping.lane is not None:
            places = translate_ranks(cast("MPI.Intracomm", grouping.lane), comms.world)
            is_by_host = grouping.own.node is not None  # so that it has a rank on each host
            same_hosts = world if is_by_host else None
            network.add(grouping.lane, [nodes[place] for place in places], settings, same_hosts)
    return network
