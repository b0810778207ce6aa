"""MPI's names for torch's types and reduce operations, and tensors as MPI buffers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from kaitian_mpi.errors import UnsupportedError

LARGEST_COUNT = 1 << 30
"""Elements of one MPI call at most, for its counts are C ints."""

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
"""Types that MPI cannot reduce; see `direct`."""

Buffer = tuple[MPI.buffer, MPI.Datatype]

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

# What is moved without being reduced needs a type of the right size only.
_MOVED: dict[int, MPI.Datatype] = {
    1: MPI.UINT8_T,
    2: MPI.INT16_T,
    4: MPI.INT32_T,
    8: MPI.INT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}

_OPERATIONS: dict[object, MPI.Op] = {
    dist.ReduceOp.SUM: MPI.SUM,
    dist.ReduceOp.AVG: MPI.SUM,
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


def kind_of(op: Any) -> Any:
    """Return the kind of one of torch's reduce operations; a plain kind is itself."""
    return getattr(op, "op", op)


@functools.cache
def check_reduction(dtype: torch.dtype, op: Any) -> None:
    """Check that tensors of this type can be reduced so; said before anything is sent.

    Raises:
        UnsupportedError: they cannot.
    """
    kind = kind_of(op)
    table = _LOGICAL if dtype is torch.bool else _OPERATIONS
    inexact = dtype.is_floating_point or dtype.is_complex
    impossible = (kind in _BITWISE and inexact) or (kind in _ORDERED and dtype.is_complex)
    if kind not in table or impossible:
        raise UnsupportedError(f"reduce operation {kind} on {dtype} is not supported by kaitian")
    if dtype not in _TYPES and dtype not in SIXTEEN_BIT:
        raise UnsupportedError(f"a reduction of {dtype} is not supported by kaitian")


@functools.cache
def reduction(dtype: torch.dtype, op: Any) -> MPI.Op:
    """Return MPI's operation for torch's, that of a sum for an average."""
    return (_LOGICAL if dtype is torch.bool else _OPERATIONS)[kind_of(op)]


def typed(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous host tensor as a buffer of its own type, to be reduced."""
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return memory, _TYPES[tensor.dtype]


def moved(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous host tensor of any type and size as a buffer, to be moved unchanged."""
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    if tensor.numel() > LARGEST_COUNT:
        return memory, _one_of(tensor.nbytes)
    return memory, _MOVED[tensor.element_size()]


@functools.cache
def _one_of(size_bytes: int) -> MPI.Datatype:
    """Return a type as long as that, for sizes that are more than a C int can count."""
    blocks, rest = divmod(size_bytes, LARGEST_COUNT)
    block = MPI.BYTE.Create_contiguous(LARGEST_COUNT)
    places = [0, blocks * LARGEST_COUNT]
    return MPI.Datatype.Create_struct([blocks, rest], places, [block, MPI.BYTE]).Commit()
