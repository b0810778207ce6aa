"""A vendor's own collective library (NCCL and its like) for the ranks of one device kind."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kaitian_mpi.mpi.datatypes import Reduction

# What operations are called before torch 2.13.
_EARLIER_NAMES = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


class VendorGroup:
    """The ranks of one kind, joined by their vendor's library. Tensors stay on the device."""

    def __init__(
        self, backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        """Join the group. Collective over its ranks.

        Args:
            backend: the vendor's torch.distributed backend, such as `nccl`.
            store: a store of the group's own, for the library's bootstrap.
            rank: this rank in the group.
            size: how many ranks the group has.
            timeout: how long one collective may take.
        """
        self.rank, self.size = rank, size
        self._backend = _create(backend, store, rank, size, timeout)

    def call(self, name: str, *arguments: Any) -> None:
        """Carry out one of torch's operations on tensors of this device."""
        if not hasattr(self._backend, name):
            name = _EARLIER_NAMES[name]
        getattr(self._backend, name)(*arguments).wait()

    def reduce_shares(self, tensor: torch.Tensor, shares: Sequence[int], op: Reduction) -> None:
        """Reduce piece r of a flat tensor, `shares[r]` long, to rank r, in place."""
        for root, piece in enumerate(tensor.split(list(shares))):
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = dist.ReduceOp(op.kind), root
            self._backend.reduce([piece], options).wait()

    def spread_shares(self, tensor: torch.Tensor, shares: Sequence[int]) -> None:
        """Copy piece r of a flat tensor, `shares[r]` long, from rank r to every rank."""
        for root, piece in enumerate(tensor.split(list(shares))):
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._backend.broadcast([piece], options).wait()

    def close(self) -> None:
        """Release the library's resources. Collective over the group."""
        self._backend.shutdown()


def _create(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    # A vendor's plug-in has registered itself with torch when its package was imported.
    plugin = dist.Backend._plugins[backend.upper()]
    if plugin.extended_api:
        described = dist.distributed_c10d._DistributedBackendOptions()
        described.store, described.group_rank, described.group_size = store, rank, size
        described.timeout = timeout
        return plugin.creator_fn(described, None)
    return plugin.creator_fn(store, rank, size, timeout)
