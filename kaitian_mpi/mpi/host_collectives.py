"""Collectives on tensors in host memory, by MPI, in place.

Every function is collective over `comm`. Tensors are contiguous and on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from kaitian_mpi.errors import UnsupportedError

# Above this many elements a call is cut in pieces: MPI's counts are C ints.
_PIECE = 1 << 30

_TYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.C_BOOL,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

_OPERATIONS: dict[object, MPI.Op] = {
    dist.ReduceOp.SUM: MPI.SUM,
    dist.ReduceOp.PRODUCT: MPI.PROD,
    dist.ReduceOp.MIN: MPI.MIN,
    dist.ReduceOp.MAX: MPI.MAX,
    dist.ReduceOp.BAND: MPI.BAND,
    dist.ReduceOp.BOR: MPI.BOR,
    dist.ReduceOp.BXOR: MPI.BXOR,
}
_LOGICAL: dict[object, MPI.Op] = {
    dist.ReduceOp.SUM: MPI.LOR,
    dist.ReduceOp.MAX: MPI.LOR,
    dist.ReduceOp.BOR: MPI.LOR,
    dist.ReduceOp.PRODUCT: MPI.LAND,
    dist.ReduceOp.MIN: MPI.LAND,
    dist.ReduceOp.BAND: MPI.LAND,
    dist.ReduceOp.BXOR: MPI.LXOR,
}
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def reduction(dtype: torch.dtype, op: dist.ReduceOp) -> MPI.Op:
    """Return MPI's operation for torch's.

    Raises:
        UnsupportedError: MPI cannot do it for this type; said before anything is sent.
    """
    kind = getattr(op, "op", op)  # a ReduceOp object holds its kind, a plain kind is itself
    table = _LOGICAL if dtype is torch.bool else _OPERATIONS
    inexact = dtype.is_floating_point or dtype.is_complex
    impossible = (kind in _BITWISE and inexact) or (kind in _ORDERED and dtype.is_complex)
    if kind not in table or impossible:
        raise UnsupportedError(f"reduce operation {kind} on {dtype} is not supported by kaitian")
    if dtype not in _TYPES:
        raise UnsupportedError(f"a reduction of {dtype} is not supported by kaitian")
    return table[kind]


def allreduce(comm: MPI.Comm, tensor: torch.Tensor, op: MPI.Op = MPI.SUM) -> None:
    """Leave the reduction over all ranks in `tensor` on every rank."""
    if comm.size > 1:
        for piece in _pieces(tensor):
            comm.Allreduce(MPI.IN_PLACE, _typed(piece), op)


def broadcast(comm: MPI.Comm, tensor: torch.Tensor, root: int) -> None:
    """Copy `tensor` from rank `root` of `comm` to every rank; any dtype."""
    if comm.size > 1:
        for piece in _pieces(_as_bytes(tensor)):
            comm.Bcast(_typed(piece), root)


def reduce_shares(
    comm: MPI.Comm, tensor: torch.Tensor, shares: Sequence[int], op: MPI.Op = MPI.SUM
) -> None:
    """Reduce piece r of `tensor` to rank r of `comm`, in place.

    `shares` are the pieces' lengths; there may be fewer than ranks. Afterwards only a rank's own
    piece is defined.
    """
    if comm.size == 1:
        return
    pieces = tensor.view(-1).split(list(shares))
    if len(pieces) > 1 and tensor.numel() < _PIECE:
        counts = [*shares, *[0] * (comm.size - len(shares))]
        own = pieces[comm.rank] if comm.rank < len(pieces) else tensor.new_empty(0)
        result = torch.empty_like(own)
        comm.Reduce_scatter(_typed(tensor), _typed(result), counts, op)
        own.copy_(result)
        return
    for root, share in enumerate(pieces):
        reduce(comm, share, root, op)


def spread_shares(comm: MPI.Comm, tensor: torch.Tensor, shares: Sequence[int]) -> None:
    """Copy piece r of `tensor` from rank r of `comm` to every rank; the reverse of reducing."""
    if comm.size == 1:
        return
    if len(shares) > 1 and tensor.numel() < _PIECE:
        counts = [*shares, *[0] * (comm.size - len(shares))]
        comm.Allgatherv(MPI.IN_PLACE, (tensor.numpy(), counts, _TYPES[tensor.dtype]))
        return
    for root, piece in enumerate(tensor.view(-1).split(list(shares))):
        broadcast(comm, piece, root)


def all_gather(
    comm: MPI.Comm, gathered: torch.Tensor, tensor: torch.Tensor, counts: Sequence[int]
) -> None:
    """Gather rank r's flat `tensor`, `counts[r]` long, into flat `gathered`; any dtype."""
    target = (_plain(gathered), list(counts), _mover(gathered))
    comm.Allgatherv((_plain(tensor), _mover(tensor)), target)


def reduce(comm: MPI.Comm, tensor: torch.Tensor, root: int, op: MPI.Op) -> None:
    """Leave the reduction over all ranks in `tensor` on rank `root`; elsewhere it stays."""
    for piece in _pieces(tensor):
        if comm.rank == root:
            comm.Reduce(MPI.IN_PLACE, _typed(piece), op, root)
        else:
            comm.Reduce(_typed(piece), None, op, root)


def gather(comm: MPI.Comm, gathered: torch.Tensor | None, tensor: torch.Tensor, root: int) -> None:
    """Gather every rank's flat `tensor` into flat `gathered` on rank `root`; any dtype."""
    target = None if gathered is None else (_plain(gathered), _mover(gathered))
    comm.Gather((_plain(tensor), _mover(tensor)), target, root)


def scatter(
    comm: MPI.Comm, tensor: torch.Tensor, scattered: torch.Tensor | None, root: int
) -> None:
    """Give every rank its piece of rank `root`'s flat `scattered` in flat `tensor`; any dtype."""
    source = None if scattered is None else (_plain(scattered), _mover(scattered))
    comm.Scatter(source, (_plain(tensor), _mover(tensor)), root)


def reduce_scatter(
    comm: MPI.Comm,
    result: torch.Tensor,
    tensor: torch.Tensor,
    counts: Sequence[int],
    op: MPI.Op,
) -> None:
    """Reduce piece r of flat `tensor`, `counts[r]` long, into flat `result` on rank r."""
    comm.Reduce_scatter(_typed(tensor), _typed(result), list(counts), op)


def all_to_all(
    comm: MPI.Comm,
    received: torch.Tensor,
    received_counts: Sequence[int],
    sent: torch.Tensor,
    sent_counts: Sequence[int],
) -> None:
    """Send piece r of flat `sent` to rank r, and receive its pieces in order; any dtype."""
    comm.Alltoallv(
        (_plain(sent), list(sent_counts), _mover(sent)),
        (_plain(received), list(received_counts), _mover(received)),
    )


# What moves without being reduced needs a type of the right size only.
_MOVERS: dict[int, tuple[MPI.Datatype, torch.dtype]] = {
    1: (MPI.UINT8_T, torch.uint8),
    2: (MPI.INT16_T, torch.int16),
    4: (MPI.INT32_T, torch.int32),
    8: (MPI.INT64_T, torch.int64),
    16: (MPI.C_DOUBLE_COMPLEX, torch.complex128),
}


def message(tensor: torch.Tensor) -> tuple[np.ndarray, MPI.Datatype]:
    """Return a contiguous host tensor as a buffer that mpi4py can send or fill."""
    return _plain(tensor), _mover(tensor)


def _mover(tensor: torch.Tensor) -> MPI.Datatype:
    return _MOVERS[tensor.element_size()][0]


def _plain(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().view(-1)
    return flat.view(_MOVERS[tensor.element_size()][1]).numpy()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = tensor.view(-1)
    return flat.split(_PIECE) if flat.numel() else ()


def _typed(tensor: torch.Tensor) -> tuple[np.ndarray, MPI.Datatype]:
    return tensor.numpy(), _TYPES[tensor.dtype]
