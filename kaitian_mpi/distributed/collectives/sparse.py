"""The sum of `torch.sparse_coo` tensors, whose numbers of entries differ between ranks."""

from __future__ import annotations

import torch

from kaitian_mpi.distributed.collectives.host import HostOperations


def sum_sparse(host: HostOperations, tensor: torch.Tensor) -> None:
    """Sum a sparse tensor over all ranks, in place; the result is coalesced. Collective."""
    rank_tensor = tensor.detach().coalesce()
    indices = rank_tensor.indices()
    entries = rank_tensor.values()
    counts = torch.zeros(host.size, dtype=torch.int64)
    host.all_gather_single(counts, torch.tensor([indices.size(1)]))
    # Transposed to one row per entry, so that each rank's piece is contiguous.
    rows = [indices.new_empty((count, indices.size(0))) for count in counts.tolist()]
    values = [entries.new_empty((count, *entries.shape[1:])) for count in counts.tolist()]
    host.all_gather(rows, indices.t())
    host.all_gather(values, entries)
    total = torch.sparse_coo_tensor(torch.cat(rows).t(), torch.cat(values), tensor.shape)
    with torch.no_grad():
        tensor.copy_(total.coalesce())
