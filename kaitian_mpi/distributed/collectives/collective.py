"""The base types of collectives: a call with its tensors, its checks, and how it is executed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from kaitian_mpi.errors import UnsupportedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from kaitian_mpi.distributed.collectives.host import HostOperations
    from kaitian_mpi.distributed.network.residual import Residual

Tensors = list[torch.Tensor]
Call = Callable[[], None]
"""Executes a collective on this rank."""


class _Fields(NamedTuple):  # immutable like a frozen dataclass, but created in a third of the time
    outputs: Any
    inputs: Any
    options: Any
    op: Any = None
    root: int = -1
    splits: tuple[list[int], list[int]] = ([], [])
    residual: Residual | None = None


class Collective(_Fields, ABC):
    """One call of a collective on this rank; its tensors may be on any device.

    Attributes:
        outputs: a list of the tensors to write; for in-place operations also the inputs.
        inputs: a list of the tensors to read; lists by rank if there is one tensor per rank.
        options: torch's options object, such as `AllreduceOptions`.
        op: torch's reduce operation; None if nothing is reduced.
        root: the root's rank; -1 if there is no root.
        splits: for `all_to_all_single`, the rows from and to each rank; empty for equal parts.
        residual: the format in which gradients cross between hosts; None: as they are.
    """

    __slots__ = ()

    name: ClassVar[str]
    """The name in profiles, as for gloo, such as `all_reduce`."""
    operator: ClassVar[str]
    """The operator's name in `torch.ops.c10d`."""
    may_be_uneven: ClassVar[bool] = False
    """Whether shapes may differ between ranks."""
    takes_sparse: ClassVar[bool] = False
    """Whether the tensors may be sparse."""

    @property
    def result(self) -> Tensors:
        """The tensors of the caller's `Work`: the outputs or, on a rank without any, the inputs."""
        return self.outputs or self.inputs

    def check(self, rank: int, size: int) -> None:
        """Raise an `UnsupportedError` if the arguments do not fit on rank `rank` of `size`."""

    @abstractmethod
    def on_host(self, host: HostOperations) -> Call:
        """Return a function that executes it in host memory; the function is collective.

        Raises:
            UnsupportedError: the reduction is not supported.
        """


class LibraryCollective(Collective):
    """A collective that vendors' libraries support as well."""

    __slots__ = ()

    @abstractmethod
    def on_library(self, library: Any) -> list[Work]:
        """Start it on a vendor's process group, such as a `ProcessGroupNCCL`. Collective."""

    def on_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LibraryCollective:
        """Return the same collective with each tensor replaced by `change(tensor)`."""
        return type(self)(*(_changed(value, change) for value in self))


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return [_changed(item, change) for item in value] if isinstance(value, list) else value


def call_for_each(method: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Call:
    """Return a function that calls `method` with each tuple of arguments, in order."""
    if len(arguments) == 1:
        return partial(method, *arguments[0])
    return partial(_call_each, method, arguments)


def _call_each(method: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    for arguments in calls:
        method(*arguments)


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
                f"{tensor.numel()}"
            )


def check_whole(whole: torch.Tensor, part: torch.Tensor, size: int, name: str) -> None:
    """Check that one tensor has a part for each of `size` ranks."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise UnsupportedError(
            f"{name}: the tensor of all ranks has {whole.numel()} elements of {whole.dtype}; it "
            f"must have {size} times {part.numel()} of {part.dtype}"
        )
