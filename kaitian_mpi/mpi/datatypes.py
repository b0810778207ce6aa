"""Maps torch's dtypes and reduce operations to MPI's, and tensors to MPI buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from kaitian_mpi.errors import UnsupportedError

MAX_COUNT = 1 << 30
"""The most elements in one MPI call, because its counts are C ints."""

ACCUMULATION_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
}
"""The dtype in which values of a narrow dtype are accumulated, to round or wrap only once."""

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

# Data that is moved without being reduced needs only a type of the right size.
_MOVED: dict[int, MPI.Datatype] = {
    1: MPI.UINT8_T,
    2: MPI.INT16_T,
    4: MPI.INT32_T,
    8: MPI.INT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}


@dataclass(frozen=True)
class Reduction:
    """A reduce operation for tensors of one dtype."""

    kind: Any
    """torch's reduce operation."""
    mpi_op: MPI.Op
    """MPI's operation; for an average that of the sum, which is divided afterwards."""
    combine: Callable[..., torch.Tensor]
    """torch's function of two tensors, which takes `out`."""
    is_average: bool = False

    def mpi_supports(self, dtype: torch.dtype) -> bool:
        """Return whether MPI reduces this dtype correctly (open-mpi/ompi#8045)."""
        if dtype not in ACCUMULATION_DTYPES:
            return True
        return dtype in _TYPES and self.mpi_op != MPI.SUM

    def in_supported_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host tensor in a dtype that MPI reduces correctly: itself or a copy."""
        if self.mpi_supports(tensor.dtype):
            return tensor
        return tensor.to(ACCUMULATION_DTYPES[tensor.dtype])

    @property
    def without_division(self) -> Reduction:
        """The same reduction, but the sum for an average."""
        return _OPERATIONS[dist.ReduceOp.SUM] if self.is_average else self

    def divide_average(self, total: torch.Tensor, size: int) -> None:
        """For an average, divide the sum by the number of ranks, in place; integers truncate."""
        if not self.is_average:
            return
        inexact = total.is_floating_point() or total.is_complex()
        total.div_(size, rounding_mode=None if inexact else "trunc")


def _by_kind(*reductions: Reduction) -> dict[Any, Reduction]:
    return {reduction.kind: reduction for reduction in reductions}


_OPERATIONS = _by_kind(
    Reduction(dist.ReduceOp.SUM, MPI.SUM, torch.add),
    Reduction(dist.ReduceOp.AVG, MPI.SUM, torch.add, is_average=True),
    Reduction(dist.ReduceOp.PRODUCT, MPI.PROD, torch.mul),
    Reduction(dist.ReduceOp.MIN, MPI.MIN, torch.minimum),
    Reduction(dist.ReduceOp.MAX, MPI.MAX, torch.maximum),
    Reduction(dist.ReduceOp.BAND, MPI.BAND, torch.bitwise_and),
    Reduction(dist.ReduceOp.BOR, MPI.BOR, torch.bitwise_or),
    Reduction(dist.ReduceOp.BXOR, MPI.BXOR, torch.bitwise_xor),
)
_LOGICAL = _by_kind(
    Reduction(dist.ReduceOp.SUM, MPI.LOR, torch.logical_or),
    Reduction(dist.ReduceOp.MAX, MPI.LOR, torch.logical_or),
    Reduction(dist.ReduceOp.BOR, MPI.LOR, torch.logical_or),
    Reduction(dist.ReduceOp.PRODUCT, MPI.LAND, torch.logical_and),
    Reduction(dist.ReduceOp.MIN, MPI.LAND, torch.logical_and),
    Reduction(dist.ReduceOp.BAND, MPI.LAND, torch.logical_and),
    Reduction(dist.ReduceOp.BXOR, MPI.LXOR, torch.logical_xor),
)
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
SUM = _OPERATIONS[dist.ReduceOp.SUM]


@functools.cache
def reduction(dtype: torch.dtype, op: Any) -> Reduction:
    """Return the reduction of this dtype by one of torch's operations, or raise."""
    kind = getattr(op, "op", op)  # a ReduceOp object wraps the enum member
    table = _LOGICAL if dtype is torch.bool else _OPERATIONS
    inexact = dtype.is_floating_point or dtype.is_complex
    impossible = (kind in _BITWISE and inexact) or (kind in _ORDERED and dtype.is_complex)
    if kind not in table or impossible:
        raise UnsupportedError(
            f"reduce operation {kind} on {dtype} is not supported by kaitian; use another, or "
            "convert the tensor"
        )
    if dtype not in _TYPES and dtype not in ACCUMULATION_DTYPES:
        raise UnsupportedError(
            f"a reduction of {dtype} is not supported by kaitian; convert the tensor"
        )
    return table[kind]


def as_buffer(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous host tensor as an MPI buffer of its own dtype, to be reduced.

    It does not keep the tensor alive: pass a variable that lives until MPI is done, not a temporary
    value. The same holds for `as_raw_buffer`.
    """
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return memory, _TYPES[tensor.dtype]


def as_raw_buffer(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous host tensor of any dtype and size as an MPI buffer, to be moved as is."""
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    is_long = tensor.numel() > MAX_COUNT
    return memory, _one_of(tensor.nbytes) if is_long else _MOVED[tensor.element_size()]


def separate(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `source`, or a copy if it shares memory with `target`, which MPI does not allow."""
    start, other = source.data_ptr(), target.data_ptr()
    overlaps = start < other + target.nbytes and other < start + source.nbytes
    return source.clone() if overlaps else source


def absolute_type(tensor: torch.Tensor, start: int, end: int) -> MPI.Datatype:
    """Return a datatype with the address (for `MPI_BOTTOM`) of bytes; the caller frees it."""
    memory = MPI.buffer.fromaddress(tensor.data_ptr() + start, end - start)
    return _one_of(end - start).Create_hindexed([1], [MPI.Get_address(memory)]).Commit()


@functools.cache
def _one_of(size_bytes: int) -> MPI.Datatype:
    blocks, remainder = divmod(size_bytes, MAX_COUNT)
    block = MPI.BYTE.Create_contiguous(MAX_COUNT)
    offsets = [0, blocks * MAX_COUNT]
    return MPI.Datatype.Create_struct([blocks, remainder], offsets, [block, MPI.BYTE]).Commit()
