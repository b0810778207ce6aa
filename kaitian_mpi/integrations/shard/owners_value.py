"""A parameter's values in a `state_dict`, which are read from its owners when it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kaitian_mpi.distributed.pending_parameter import needs_no_values
from kaitian_mpi.errors import UserError

_OF_MEMORY = {"stride", "is_contiguous", "storage_offset"}


class OwnersValue(torch.Tensor):
    """A parameter's values, in host memory, which are read from its owners when they are needed.

    All ranks may make a `state_dict`, and only the one that writes it needs the memory. As in one
    process, it shows the parameter's values of the step in which it is read.
    """

    read: Callable[[], torch.Tensor]
    version: Callable[[], Any]
    whole: torch.Tensor | None
    whole_version: Any

    @staticmethod
    def of(
        parameter: torch.Tensor, read: Callable[[], torch.Tensor], version: Callable[[], Any]
    ) -> OwnersValue:
        """Return what stands for a parameter's values. Not collective.

        Args:
            parameter: whose shape and dtype it has.
            read: returns the values.
            version: returns what is another one once the values have changed.
        """
        return OwnersValue.become(torch.empty(0, dtype=parameter.dtype), parameter, read, version)

    @staticmethod
    def become(
        tensor: torch.Tensor,
        parameter: torch.Tensor,
        read: Callable[[], torch.Tensor],
        version: Callable[[], Any],
    ) -> OwnersValue:
        """Let a tensor that the script has stand for a parameter's values, and return it."""
        with torch._C.DisableTorchFunctionSubclass():
            tensor.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            tensor.__class__ = OwnersValue
        assert isinstance(tensor, OwnersValue)
        tensor.read = read
        tensor.version = version
        tensor.whole = tensor.whole_version = None
        return tensor

    def values(self) -> torch.Tensor:
        """Return the values, read from their owners if they have changed since the last time."""
        version = self.version()
        if self.whole is None or version != self.whole_version:
            self.whole = self.read()
            self.whole_version = version
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if needs_no_values(func) and getattr(func, "__name__", "") not in _OF_MEMORY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        used: list[torch.Tensor] = []
        args = _with_values(args, used)
        kwargs = _with_values(kwargs or {}, used)
        versions = [whole._version for whole in used]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if versions != [whole._version for whole in used]:
            raise UserError(
                "--layout shard: values of a state_dict were changed in place, which does not "
                "reach the sharded parameters; use load_state_dict(), or change the parameters"
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.values().clone()
        return memo[id(self)]  # type: ignore[no-any-return]


def _with_values(value: Any, used: list[torch.Tensor]) -> Any:
    """Return arguments with values, which are added to `used`."""
    if isinstance(value, OwnersValue):
        used.append(value.values())
        return used[-1]
    if isinstance(value, list | tuple):
        return type(value)([_with_values(item, used) for item in value])
    if isinstance(value, Mapping):
        return {key: _with_values(item, used) for key, item in value.items()}
    return value
