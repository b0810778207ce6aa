"""A tensor's values in a `state_dict`, which are read from their owners when they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from kaitian_mpi.distributed.pending_parameter import needs_no_values
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.saved_storage import standing_in

_OF_MEMORY = {"stride", "is_contiguous", "storage_offset"}

Allocate = Callable[[torch.Tensor], torch.Tensor]
"""Returns memory for a tensor of another one's shape, strides and dtype."""


class ValueSource:
    """Where a tensor's values are read from.

    Attributes:
        like: a tensor on meta of the same shape, strides and dtype.
        read_into: reads the values from their owners into a tensor. Not collective.
        version: returns a value that differs after each change of the values.
    """

    def __init__(
        self,
        like: torch.Tensor,
        read_into: Callable[[torch.Tensor], None],
        version: Callable[[], Any],
        allocate: Allocate,
    ) -> None:
        """Read nothing yet.

        Args:
            like: a tensor on meta of the same shape, strides and dtype.
            read_into: reads the values from their owners into a tensor. Not collective.
            version: returns a value that differs after each change of the values.
            allocate: returns memory for values that are kept.
        """
        self.like = like
        self.version = version
        self.read_into = torch.no_grad()(read_into)
        self._allocate = allocate

    def read_to_keep(self) -> torch.Tensor:
        """Return the values, in memory for as long as a script may keep a state dict."""
        values = self._allocate(self.like)
        self.read_into(values)
        return values


class LazyValue(torch.Tensor):
    """A tensor's values, in host memory, which are read from their owners when they are needed.

    All ranks may make a `state_dict`, and only the one that writes it needs the memory: to
    `torch.save`, that of one tensor at a time.
    """

    goes_first: ClassVar[bool] = True
    """See `GOES_FIRST`: to parameters, its own memory would be its values."""
    source: ValueSource
    whole: torch.Tensor | None
    whole_version: Any

    @staticmethod
    def of(source: ValueSource) -> LazyValue:
        """Return what stands for the values of a source. Not collective."""
        return LazyValue.become(torch.empty(0, dtype=source.like.dtype), source)

    @staticmethod
    def become(tensor: torch.Tensor, source: ValueSource) -> LazyValue:
        """Let a tensor that the script has stand for the values of a source, and return it."""
        with torch._C.DisableTorchFunctionSubclass():
            tensor.data = torch.zeros((), dtype=source.like.dtype).expand(source.like.shape)
            tensor.__class__ = LazyValue
        assert isinstance(tensor, LazyValue)
        tensor.source = source
        tensor.whole = tensor.whole_version = None
        return tensor

    def values(self) -> torch.Tensor:
        """Return the values, read from their owners if they have changed since the last time."""
        version = self.source.version()
        if self.whole is None or version != self.whole_version:
            self.whole = None  # the memory of the former values
            self.whole = self.source.read_to_keep()
            self.whole_version = version
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if needs_no_values(func):
            if name in _OF_MEMORY:
                args = [a.source.like if isinstance(a, LazyValue) else a for a in args]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        used: list[torch.Tensor] = []
        args = _with_values(args, used)
        kwargs = _with_values(kwargs or {}, used)
        versions = [whole._version for whole in used]
        result = func(*args, **kwargs)  # a parameter among the arguments then brings its values
        if versions != [whole._version for whole in used]:
            raise UserError(
                "--layout shard: values of a state_dict were changed in place, which does not "
                "reach the sharded parameters; use load_state_dict(), or change the parameters"
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_here = self.whole is not None and self.whole_version == self.source.version()
        reduced = None if is_here else standing_in(self.source, protocol)
        return self.values().__reduce_ex__(protocol) if reduced is None else reduced

    def __copy__(self) -> torch.Tensor:
        return self.values()[...]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.values().clone()
        return memo[id(self)]  # type: ignore[no-any-return]


def _with_values(value: Any, used: list[torch.Tensor]) -> Any:
    """Return arguments with values, which are added to `used`."""
    if isinstance(value, LazyValue):
        used.append(value.values())
        return used[-1]
    if isinstance(value, list | tuple):
        return type(value)([_with_values(item, used) for item in value])
    if isinstance(value, Mapping):
        return {key: _with_values(item, used) for key, item in value.items()}
    return value
