"""A parameter's values in a `state_dict`, which are read from its owners when it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kaitian_mpi.distributed.pending_parameter import needs_no_values

_OF_MEMORY = {"stride", "is_contiguous", "storage_offset"}


class OwnersValue(torch.Tensor):
    """A parameter's values, in host memory, which are read from its owners when they are needed.

    All ranks may make a `state_dict`, and only the one that writes it needs the memory.
    """

    read: Callable[[], torch.Tensor]
    whole: torch.Tensor | None

    @staticmethod
    def of(parameter: torch.Tensor, read: Callable[[], torch.Tensor]) -> OwnersValue:
        """Return what stands for a parameter's values; `read` returns them. Not collective."""
        with torch._C.DisableTorchFunctionSubclass():
            number = torch.zeros((), dtype=parameter.dtype)
            value = torch.Tensor._make_subclass(OwnersValue, number.expand(parameter.shape))
        value.read = read
        value.whole = None
        return value

    def values(self) -> torch.Tensor:
        """Return the values, read from their owners the first time."""
        if self.whole is None:
            self.whole = self.read()
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not needs_no_values(func) or getattr(func, "__name__", "") in _OF_MEMORY:
            args, kwargs = _with_values(args), _with_values(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.values().clone()
        return memo[id(self)]  # type: ignore[no-any-return]


def _with_values(value: Any) -> Any:
    if isinstance(value, OwnersValue):
        return value.values()
    if isinstance(value, list | tuple):
        return type(value)([_with_values(item) for item in value])
    if isinstance(value, Mapping):
        return {key: _with_values(item) for key, item in value.items()}
    return value
