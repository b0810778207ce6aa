"""A vendor's own collective library (NCCL and its like) for the ranks of one device kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.collectives.staging import (
    contiguous,
    from_host,
    is_plain,
    keep_for_current_stream,
    tensors_in,
)

if TYPE_CHECKING:
    from kaitian_mpi.collectives.collective import LibraryCollective
    from kaitian_mpi.devices import Device
    from kaitian_mpi.mpi.datatypes import Reduction
    from kaitian_mpi.mpi.topology import GroupComms

Loans = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""What the library was given and what the caller gave, by the id of the latter."""


@dataclass(frozen=True)
class OwnDevice:
    """This rank's device."""

    device: torch.device
    kind: Device
    """What there is to know about it."""
    has_vendor: bool
    """Whether the vendor's library can join the ranks of this rank's group."""


class VendorLibrary:
    """The library of this rank's kind, which joins the ranks when it is first needed."""

    def __init__(
        self, own: OwnDevice, comms: GroupComms, store: dist.Store, timeout: timedelta
    ) -> None:
        """Prepare.

        Args:
            own: this rank's device.
            comms: the ranks, split by kind.
            store: for the library's bootstrap.
            timeout: how long one collective may take.
        """
        self.is_present = own.has_vendor
        """Whether there is such a library."""
        self._own = own
        self._comms = comms
        self._store = store
        self._timeout = timeout
        self._group: VendorGroup | None = None

    def group_for(self, dtypes: Iterable[torch.dtype], op: Any = None) -> VendorGroup | None:
        """Return the ranks of this kind, joined by the library; None where that is not for it.

        The same on all ranks of the kind; collective over them the first time.

        Args:
            dtypes: the types of what is to be reduced, or moved.
            op: how to reduce, as torch has it; None where nothing is reduced.
        """
        if not self.is_present:
            return None
        named = None if op is None else getattr(op, "op", op).name
        if not all(self._own.kind.vendor_takes(dtype, named) for dtype in dtypes):
            return None
        if self._group is None:
            own, ranks = self._own, self._comms.group
            store = dist.PrefixStore(f"vendor/{self._comms.own.kind}", self._store)
            self._group = VendorGroup(
                own.kind, own.device, store, ranks.rank, ranks.size, self._timeout
            )
        return self._group

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the collectives that follow another time-out, if the library can."""
        self._timeout = timeout
        if self._group is not None:
            self._group.set_timeout(timeout)

    def close(self) -> None:
        """Release what the library holds. Collective over the ranks of this kind."""
        if self._group is not None:
            self._group.close()


class VendorGroup:
    """The ranks of one kind, joined by their vendor's library. Tensors stay on the device.

    What is on the host, or not contiguous, is copied to this rank's device and back, so that no
    rank depends on where another's tensors are. An operation is only given to the library here;
    it runs on the device, after what the calling thread's current stream has been given so far.
    """

    def __init__(
        self,
        kind: Device,
        device: torch.device,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        """Join the group. Collective over its ranks.

        Args:
            kind: the ranks' device kind; it names the vendor's torch.distributed backend.
            device: this rank's device.
            store: a store of the group's own, for the library's bootstrap.
            rank: this rank in the group.
            size: how many ranks the group has.
            timeout: how long one collective may take.
        """
        self.rank, self.size = rank, size
        self._device = device
        self._backend = kind.join_vendor_group(store, rank, size, timeout)

    def has_in_place(self, collective: LibraryCollective) -> bool:
        """Return whether the library can use all of its tensors as and where they are."""
        return all(self._is_in_place(tensor) for tensor in tensors_in(collective))

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy of it, as the library needs it: contiguous, on the device.

        `staging.from_host` brings a copy's values back.
        """
        return tensor if self._is_in_place(tensor) else contiguous(tensor.to(self._device))

    def start(self, collective: LibraryCollective) -> VendorCall:
        """Give a collective to the library; its tensors may be anywhere."""
        loans: Loans = {}

        def lend(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in loans:
                loans[id(tensor)] = self.lend(tensor), tensor
            return loans[id(tensor)][0]

        works = collective.on_tensors(lend).on_library(self._backend)
        written = {id(tensor) for tensor in collective.result}
        return VendorCall(works, [loan for key, loan in loans.items() if key in written])

    def reduce_pieces(self, tensor: torch.Tensor, shares: Sequence[int], op: Reduction) -> None:
        """Reduce piece r of a flat tensor, `shares[r]` long, to rank r, in place."""
        if self.size == 1:
            return
        for root, piece in enumerate(tensor.split(list(shares))):
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = dist.ReduceOp(op.kind), root
            self._backend.reduce([piece], options).wait()

    def gather_pieces(self, tensor: torch.Tensor, shares: Sequence[int]) -> None:
        """Copy piece r of a flat tensor, `shares[r]` long, from rank r to every rank."""
        if self.size == 1:
            return
        for root, piece in enumerate(tensor.split(list(shares))):
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._backend.broadcast([piece], options).wait()

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the collectives that follow another time-out, if the library can."""
        if hasattr(self._backend, "_set_default_timeout"):
            self._backend._set_default_timeout(timeout)

    def close(self) -> None:
        """Release the library's resources. Collective over the group."""
        self._backend.shutdown()

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type and is_plain(tensor)


class VendorCall(Work):
    """An operation that has been given to a vendor's library."""

    def __init__(self, works: list[Work], loans: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keep what there is to wait for.

        Args:
            works: the library's own.
            loans: what it writes, as it was given to the library and as the caller gave it.
        """
        super().__init__()
        self._works = works
        self._loans = loans

    @property
    def work(self) -> Work:
        """The library's own work where there is but one, else this."""
        return self._works[0] if len(self._works) == 1 else self

    def finish(self) -> None:
        """Bring the results to the caller's own tensors, by the current stream."""
        self.wait()
        for lent, tensor in self._loans:
            keep_for_current_stream(lent)
            from_host(lent, tensor)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait until it is done."""
        for work in self._works:
            work.wait(*([timeout] if timeout else []))
        return True

    def is_completed(self) -> bool:
        """Return whether the device has done it."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether the device has done it without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """Return the first error, if there is one."""
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        """Return the tensors it writes."""
        return [tensor for _, tensor in self._loans]

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors."""
        together = torch.futures.collect_all([work.get_future() for work in self._works])
        return together.then(lambda _: self.result())
