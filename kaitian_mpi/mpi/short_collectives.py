"""Collectives on short tensors in host memory, started without waiting for the other ranks.

They save the meeting that a longer, blocking collective needs before it, lest it spins. Every
function is collective over `comm`; tensors are contiguous, on the CPU, and must stay as they are
until the request is done.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from kaitian_mpi.mpi.datatypes import SIXTEEN_BIT, Reduction, moved, typed

_SHORT_BYTES = 64 << 10


def is_short(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is worth starting so; for those that move, of any type."""
    return tensor.nbytes <= _SHORT_BYTES


def is_short_sum(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is to be reduced is worth starting so."""
    return tensor.nbytes <= _SHORT_BYTES and tensor.dtype not in SIXTEEN_BIT


def allreduce(comm: MPI.Comm, tensor: torch.Tensor, op: Reduction) -> MPI.Request:
    """Start reducing `tensor` in place; an average is to be divided afterwards."""
    return comm.Iallreduce(MPI.IN_PLACE, typed(tensor), op.mpi_op)


def broadcast(comm: MPI.Comm, tensor: torch.Tensor, root: int) -> MPI.Request:
    """Start copying `tensor` from rank `root` to every rank."""
    return comm.Ibcast(moved(tensor), root)


def all_gather(comm: MPI.Comm, gathered: torch.Tensor, tensor: torch.Tensor) -> MPI.Request:
    """Start gathering every rank's `tensor`, all of one length, into `gathered`."""
    return comm.Iallgather(moved(tensor), moved(gathered))


def reduce_scatter(
    comm: MPI.Comm, result: torch.Tensor, tensor: torch.Tensor, op: Reduction
) -> MPI.Request:
    """Start reducing equal part r of `tensor` to `result` on rank r; an average as above."""
    return comm.Ireduce_scatter_block(typed(tensor), typed(result), op.mpi_op)
