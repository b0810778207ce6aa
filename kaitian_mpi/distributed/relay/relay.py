"""A process group's relay: takes tensors through host memory, where MPI exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.network.network import Network
from kaitian_mpi.distributed.network.residual import Residual
from kaitian_mpi.distributed.relay.chunking import Pace, agree_on_longest_chunk, agree_on_pace
from kaitian_mpi.distributed.relay.copies import (
    Copies,
    RecordedCopies,
    copies_of,
    exchange_recorded,
)
from kaitian_mpi.distributed.relay.device_aware import (
    agree_on_direct,
    may_be_direct,
    wait_for_device,
)
from kaitian_mpi.distributed.relay.pipeline import Exchange, Slots, exchange_in_chunks
from kaitian_mpi.distributed.relay.rounds import Piece, act_in_rounds, part_bytes
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import SUM, Reduction
from kaitian_mpi.mpi.relay_settings import RelaySettings
from kaitian_mpi.observe.timeline.collectives import is_recorded

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_WIDE_BYTES = 64 << 10  # up to which a message's fixed cost is what counts


class Precision(NamedTuple):
    """What an all_reduce may round off its tensor; the same on every rank."""

    dtype: torch.dtype | None = None
    """The dtype in which the tensor crosses between device kinds; None: its own."""
    residual: Residual | None = None
    """What slow links round off a buffer of gradients; None: nothing."""


EXACT = Precision()


class Relay:
    """What the relay of one process group keeps: streams and buffers by device, and its pace.

    Used by one thread at a time. The memory is bounded per process group: see `Slots`.
    """

    def __init__(
        self,
        settings: RelaySettings | None = None,
        device: torch.device | None = None,
        *,
        has_accelerators: bool = False,
        has_several_kinds: bool = False,
        network: Network | None = None,
    ) -> None:
        """Allocate nothing yet.

        If no rank of the group has an accelerator, tensors are cut as suits MPI alone. Between
        several kinds, gradients cross in the dtype that the settings say.
        """
        self.network = network or Network()
        """Reduces what is in host memory."""
        self.settings = settings or RelaySettings()
        self._device = device or torch.device("cpu")
        self.has_accelerators = has_accelerators
        self._has_several_kinds = has_several_kinds
        self._paths: dict[torch.device, tuple[Copies, Slots]] = {}
        self._direct: dict[int, bool] = {}
        self._paces: dict[int, tuple[int, Pace]] = {}
        self._slot_bytes: dict[int, tuple[int, int]] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(slots.allocated_bytes for _, slots in self._paths.values())

    def precision_of(self, gradients: torch.Tensor, residual: Residual | None) -> Precision:
        """Return what a buffer of gradients may lose; depends on its length and dtype alone."""
        is_narrowed = (
            self._has_several_kinds
            and self.settings.dtype == "bf16"
            and gradients.dtype is torch.float32
            and gradients.nbytes > _MAX_WIDE_BYTES
        )
        return Precision(torch.bfloat16 if is_narrowed else None, residual)

    def exchange(
        self,
        comm: MPI.Comm,
        tensor: torch.Tensor,
        exchange: Exchange,
        op: Reduction,
        precision: Precision = EXACT,
    ) -> None:
        """Apply `exchange` to a flat contiguous tensor, in place, in chunks. Collective.

        The chunks are the same on every rank: they depend on the tensor's length and dtype and on
        what the ranks have agreed on, not on where a rank's tensor is.

        Args:
            comm: the ranks that exchange the chunks.
            tensor: on any device.
            exchange: collective over `comm`; works on one chunk in host memory.
            op: what `exchange` does; if that is MPI's alone, a chunk may be in device memory, if
                MPI handles that well.
            precision: the dtype in which the tensor crosses.
        """
        if self._is_direct(comm, tensor, op, precision):
            wait_for_device(tensor)
            for chunk in self.split(comm, tensor):
                host_collectives.allreduce_chunk(comm, chunk, op)
            return
        crossing = tensor if precision.dtype is None else tensor.to(precision.dtype)
        self.exchange_chunks(self.split(comm, crossing), exchange)
        if crossing is not tensor:
            tensor.copy_(crossing)

    def exchange_chunks(self, chunks: Sequence[torch.Tensor], exchange: Exchange) -> None:
        """Apply `exchange` to each of the chunks of a tensor, in host memory."""
        records = is_recorded()
        if records:
            exchange = partial(exchange_recorded, exchange)
        if chunks[0].is_cpu:
            for chunk in chunks:
                exchange(chunk)
        else:
            copies, slots = self._path(chunks[0].device)
            if records:
                copies = RecordedCopies(copies)
            exchange_in_chunks(chunks, exchange, copies, slots)

    def stage(
        self, comm: MPI.Comm, pieces: Sequence[Piece], act: Callable[[list[torch.Tensor]], None]
    ) -> None:
        """Call `act` with the pieces' parts in host memory, as often as the buffers' size needs.

        Collective over `comm`. A message or a piece is cut alike on every rank, by its length.

        Args:
            comm: the ranks; at least one has an accelerator.
            pieces: at most two for each rank.
            act: collective over `comm` as far as pieces of one length are concerned.
        """
        known, memory_mb = comm.py2f(), self.settings.memory_mb
        if known not in self._slot_bytes or self._slot_bytes[known][0] != memory_mb:
            agreed = agree_on_longest_chunk(comm, memory_mb)
            self._slot_bytes[known] = memory_mb, agreed
            self._free_above(agreed)
        length = part_bytes(self._slot_bytes[known][1], 2 * comm.size)
        act_in_rounds(pieces, length, act, lambda device: self._path(device)[1])

    def split(self, comm: MPI.Comm, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the chunks of a flat tensor. Collective over `comm` the first time."""
        if not self.has_accelerators and self.network.link(comm) is not None:
            return (tensor,)  # which the network cuts itself
        if not self.has_accelerators or comm.size == 1:
            return host_collectives.allreduce_chunks(comm, tensor)
        size = tensor.element_size()
        return tensor.split([each // size for each in self._pace(comm).lengths(tensor.nbytes)])

    def _is_direct(
        self, comm: MPI.Comm, tensor: torch.Tensor, op: Reduction, precision: Precision
    ) -> bool:
        """Return whether MPI is given device memory; the same on every rank."""
        if not self.has_accelerators or comm.size == 1:
            return False
        if precision.residual is not None and self.network.link(comm) is not None:
            return False
        if precision.dtype is not None or not may_be_direct(tensor.dtype, op):
            return False
        key = comm.py2f()
        if key not in self._direct:

            def through_host(each: torch.Tensor) -> None:
                allreduce = self.network.allreduce_on(comm)
                self.exchange_chunks(self.split(comm, each), lambda chunk: allreduce(chunk, SUM))

            self._direct[key] = agree_on_direct(comm, self._device, through_host)
            self.settings.device_aware |= self._direct[key]
        return self._direct[key]

    def _pace(self, comm: MPI.Comm) -> Pace:
        known, memory_mb = comm.py2f(), self.settings.memory_mb
        if known not in self._paces or self._paces[known][0] != memory_mb:
            pace = agree_on_pace(comm, memory_mb, lambda size: self._stages(comm, size))
            self._paces[known] = memory_mb, pace
            self._free_above(pace.limit_bytes)
        return self._paces[known][1]

    def _free_above(self, slot_bytes: int) -> None:
        for _, slots in self._paths.values():
            slots.free_above(slot_bytes)

    def _path(self, device: torch.device) -> tuple[Copies, Slots]:
        if device not in self._paths:
            slots = Slots(pins=device_of(device).pins_memory)
            self._paths[device] = copies_of(device), slots
        return self._paths[device]

    def _stages(self, comm: MPI.Comm, size: int) -> list[Callable[[], None]]:
        """Return the stages of a chunk of `size` bytes on this rank's device, to be timed."""
        host = torch.zeros(size // 4)
        allreduce = self.network.allreduce_on(comm)
        chunk = torch.zeros(size // 4, device=self._device)
        if chunk.is_cpu:
            return [lambda: allreduce(host, SUM)]
        copies, _ = self._path(self._device)
        slots = Slots(pins=device_of(self._device).pins_memory)  # for now
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
