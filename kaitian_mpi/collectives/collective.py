"""What a collective is: the call, its tensors, and the ways in which it can be done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from kaitian_mpi.collectives.validation import not_dense

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from kaitian_mpi.collectives.host import HostOperations

Tensors = list[torch.Tensor]
Call = Callable[[], None]


class _Fields(NamedTuple):  # frozen as a dataclass can be, and made in a third of the time
    outputs: Any
    inputs: Any
    options: Any
    op: Any = None
    root: int = -1
    splits: tuple[list[int], list[int]] = ([], [])


class Collective(_Fields, ABC):
    """One call of a collective on this rank; its tensors may be on any device.

    Attributes:
        outputs: a list of the tensors to write; of what works in place, also its inputs.
        inputs: a list of the tensors to read; where one rank has several, lists of them by rank.
        options: torch's, such as `AllreduceOptions`.
        op: how to reduce, as torch has it; None where nothing is reduced.
        root: the one rank that gives, or gets; -1 where there is none.
        splits: of `all_to_all_single`, the rows from and to each rank; empty for equal parts.
    """

    __slots__ = ()

    name: ClassVar[str]
    """As gloo calls it in profiles, such as `all_reduce`."""
    operator: ClassVar[str]
    """Its operator in `torch.ops.c10d`."""
    may_be_uneven: ClassVar[bool] = False
    """Whether shapes may differ between ranks."""

    @property
    def result(self) -> Tensors:
        """The tensors that the caller's work holds: the outputs; on a rank without any, inputs."""
        return self.outputs or self.inputs

    def check(self, rank: int, size: int) -> None:
        """Check the arguments on rank `rank` of `size`, before anything is sent.

        Raises:
            UnsupportedError: they do not fit together, or a tensor is sparse.
        """
        for tensor in self.result:
            if tensor.layout is not torch.strided:
                raise not_dense(tensor, self.name)

    @abstractmethod
    def on_host(self, host: HostOperations) -> Call:
        """Return what does it in host memory, collective.

        Raises:
            UnsupportedError: it cannot be reduced so.
        """


class LibraryCollective(Collective):
    """A collective that vendors' libraries have, too."""

    __slots__ = ()

    @abstractmethod
    def on_library(self, library: Any) -> list[Work]:
        """Start it on a vendor's process group, such as a `ProcessGroupNCCL`. Collective."""

    def on_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LibraryCollective:
        """Return the same collective with `change(tensor)` in the place of each tensor."""
        return type(self)(*(_changed(value, change) for value in self))


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return [_changed(item, change) for item in value] if isinstance(value, list) else value


def in_turn(method: Callable[..., None], each: Iterable[tuple[Any, ...]]) -> Call:
    """Return a call of `method` with each of several tuples of arguments, in order."""
    several = list(each)
    if len(several) == 1:
        return partial(method, *several[0])
    return partial(_call_each, method, several)


def _call_each(method: Callable[..., None], several: list[tuple[Any, ...]]) -> None:
    for arguments in several:
        method(*arguments)
