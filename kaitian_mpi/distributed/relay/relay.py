"""A process group's relay: takes tensors through host memory, where MPI exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.relay.chunking import Pace, agree_on_pace
from kaitian_mpi.distributed.relay.copies import Copies, copies_of
from kaitian_mpi.distributed.relay.pipeline import Exchange, Slots, exchange_in_chunks
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import SUM
from kaitian_mpi.mpi.relay_settings import RelaySettings
from kaitian_mpi.observe.timeline.recorder import EXCHANGE, part

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.network.link import Link


class Relay:
    """What the relay of one process group keeps: streams and buffers by device, and its pace.

    Used by one thread at a time. The memory is bounded per process group: see `Slots`.
    """

    def __init__(
        self,
        settings: RelaySettings,
        device: torch.device,
        links: Mapping[int, Link],
        has_accelerators: bool,
    ) -> None:
        """Allocate nothing yet; `links` are those between hosts, by communicator.

        If no rank of the group has an accelerator, tensors are cut as suits MPI alone.
        """
        self.settings, self.has_accelerators = settings, has_accelerators
        self._device, self._links = device, links
        self._paths: dict[torch.device, tuple[Copies, Slots]] = {}
        self._paces: dict[tuple[int, int], Pace] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(slots.allocated_bytes for _, slots in self._paths.values())

    def exchange(
        self,
        comm: MPI.Comm,
        tensor: torch.Tensor,
        exchange: Exchange,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Apply `exchange` to a flat contiguous tensor, in place, in chunks. Collective.

        The chunks are the same on every rank: they depend on the tensor's length and dtype and on
        what the ranks have agreed on, not on where a rank's tensor is.
        """
        crossing = tensor if dtype is None else tensor.to(dtype)
        chunks, device = self.split(comm, crossing), crossing.device
        if crossing.is_cpu:
            for chunk in chunks:
                with part("exchange", EXCHANGE, bytes=chunk.nbytes):
                    exchange(chunk)
        else:
            if device not in self._paths:
                self._paths[device] = copies_of(device), Slots(pins=device_of(device).pins_memory)
            exchange_in_chunks(chunks, exchange, *self._paths[device])
        if crossing is not tensor:
            tensor.copy_(crossing)

    def split(self, comm: MPI.Comm, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the chunks of a flat tensor. Collective over `comm` the first time."""
        if not self.has_accelerators and comm.py2f() in self._links:
            return (tensor,)  # which the network cuts itself
        if not self.has_accelerators or comm.size == 1:
            return host_collectives.allreduce_chunks(comm, tensor)
        size = tensor.element_size()
        return tensor.split([each // size for each in self._pace(comm).lengths(tensor.nbytes)])

    def _pace(self, comm: MPI.Comm) -> Pace:
        key = comm.py2f(), self.settings.memory_mb
        if key not in self._paces:
            pace = agree_on_pace(comm, key[1], lambda size: self._stages(comm, size))
            self._paces[key] = pace
            for _, slots in self._paths.values():
                slots.free_above(pace.limit_bytes)
        return self._paces[key]

    def _stages(self, comm: MPI.Comm, size: int) -> list[Callable[[], None]]:
        """Return the stages of a chunk of `size` bytes on this rank's device, to be timed."""
        host = torch.zeros(size // 4)
        link = self._links.get(comm.py2f())
        allreduce = link.reduce_to_all if link else partial(host_collectives.allreduce, comm)
        chunk = torch.zeros(size // 4, device=self._device)
        if chunk.is_cpu:
            return [lambda: allreduce(host, SUM)]
        copies = copies_of(self._device)
        slots = Slots(pins=device_of(self._device).pins_memory)
        slots.provide(1, size)
        pinned = slots.take().view_as(chunk)
        copies.begin(chunk)

        def exchange() -> None:
            copies.copy_out(pinned, chunk, None)  # which the host only starts
            allreduce(host, SUM)
            copies.copy_back(chunk, pinned)

        return [
            exchange,
            lambda: copies.copy_out(pinned, chunk, None).synchronize(),
            lambda: copies.copy_back(chunk, pinned).synchronize(),
        ]
