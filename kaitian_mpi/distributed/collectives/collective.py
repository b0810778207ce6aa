"""One call of a collective: its tensors, and how it is executed in host memory and by a library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kaitian_mpi.distributed.collectives.staging import tensors_in
from kaitian_mpi.errors import UnsupportedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from kaitian_mpi.distributed.collectives.host import HostOperations

Tensors = list[torch.Tensor]
Call = Callable[[], None]
"""Executes a collective on this rank."""


class Collective(NamedTuple):  # created in a third of a frozen dataclass's time
    """One call of a collective on this rank; its tensors may be on any device."""

    name: str
    """The name in profiles, as for gloo, such as `all_reduce`."""
    outputs: Any
    """The tensors to write, in lists; for in-place operations also the inputs."""
    inputs: Any
    """The tensors to read, in lists."""
    options: Any
    """torch's options object, such as `AllreduceOptions`."""
    on_host: Callable[[HostOperations], Call]
    """Returns a function, collective, that executes it in host memory; checks the reduction."""
    on_library: Callable[[Any, Any, Any], list[Work]] | None = None
    """Starts it on a vendor's process group, given the outputs and inputs as that takes them; None
    if libraries do not support it."""
    op: Any = None
    """torch's reduce operation; None if nothing is reduced."""
    takes_sparse: bool = False

    @property
    def result(self) -> Tensors:
        """The tensors of the caller's `Work`: the outputs or, on a rank without any, the inputs."""
        if self.outputs and not isinstance(self.outputs[0], (list, tuple)):
            return self.outputs  # at once, as a short call takes microseconds
        return tensors_in(self.outputs) or tensors_in(self.inputs)


def call_for_each(method: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Call:
    """Return a function that calls `method` with each tuple of arguments, in order."""
    if len(arguments) == 1:
        return partial(method, *arguments[0])

    def call() -> None:
        for one_call in arguments:
            method(*one_call)

    return call


def check_pieces(
    pieces: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    size: int,
    name: str,
    *,
    equal: bool = False,
) -> None:
    """Check that there is one piece per rank, of the tensor's dtype and, if `equal`, its size."""
    if len(pieces) != size:
        raise UnsupportedError(f"{name}: {len(pieces)} tensors for {size} ranks; pass one for each")
    for rank, piece in enumerate(pieces):
        if piece.dtype != tensor.dtype:
            raise UnsupportedError(
                f"{name}: the tensor for rank {rank} is {piece.dtype}, the others are "
                f"{tensor.dtype}; pass tensors of one dtype"
            )
        if equal and piece.numel() != tensor.numel():
            raise UnsupportedError(
                f"{name}: the tensor for rank {rank} has {piece.numel()} elements instead of "
                f"{tensor.numel()}; pass tensors of one size"
            )


def check_whole(whole: torch.Tensor, part: torch.Tensor, size: int, name: str) -> None:
    """Check that one tensor has a part for each of `size` ranks."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise UnsupportedError(
            f"{name}: the tensor of all ranks has {whole.numel()} elements of {whole.dtype}; it "
            f"must have {size} times {part.numel()} of {part.dtype}"
        )


def element_counts(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the size of the first dimension on each rank; no splits mean equal parts."""
    length = tensor.shape[0] if tensor.shape else 1
    if not splits and length % size:
        raise UnsupportedError(
            f"all_to_all_single: the first dimension, {length}, is not a multiple of {size} "
            "ranks; pass split sizes"
        )
    if splits and (len(splits) != size or sum(splits) != length):
        raise UnsupportedError(
            f"all_to_all_single: the split sizes {list(splits)} must be {size} numbers that sum "
            f"to {length}"
        )
    row = tensor.numel() // length if length else 0
    return [split * row for split in splits or [length // size] * size]
