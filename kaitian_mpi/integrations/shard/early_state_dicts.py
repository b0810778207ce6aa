"""What a script has kept of parameters from before they had owners.

Tensors of a `state_dict` share the memory of the parameters, and show later values as well. When
the parameters are sharded, such a tensor becomes one that is read from the owners.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from kaitian_mpi.distributed.pending_parameter import memory_users

NO_LONGER_SHARED = (
    "--layout shard: the script has kept a tensor that shares the memory of {}, but the parameter "
    "is sharded, so neither follows the other's changes any more; keep the parameter itself, or "
    "module.state_dict()"
)


class EarlyStateDicts:
    """The tensors in the `state_dict` of modules whose parameters may be sharded later."""

    def __init__(self) -> None:
        """Know none yet."""
        # Not by equality, which is elementwise for tensors.
        self._tensors: Any = WeakIdKeyDictionary()

    def note(self, state_dict: Mapping[str, Any]) -> None:
        """Take note of a `state_dict` that the script has just made."""
        for value in state_dict.values():
            if type(value) is torch.Tensor:
                self._tensors[value] = None

    def by_parameter(
        self, module: nn.Module, numbers: Collection[int]
    ) -> dict[int, list[torch.Tensor]]:
        """Return the tensors that show a module's parameters with these numbers.

        Warns if the script has kept other tensors that share their memory.
        """
        parameters = [*module.named_parameters()]
        by_memory: dict[Any, list[torch.Tensor]] = {}
        for tensor in [*self._tensors]:
            by_memory.setdefault(_memory(tensor), []).append(tensor)
        by_number = {
            number: by_memory.get(_memory(parameters[number][1]), []) for number in numbers
        }
        early_counts = Counter(
            _address(tensor) for tensors in by_memory.values() for tensor in tensors
        )
        shared = shared_outside(module, early_counts)
        names = (parameters[n][0] for n in sorted(numbers) if _address(parameters[n][1]) in shared)
        name = next(names, None)
        if name is not None:
            warnings.warn(NO_LONGER_SHARED.format(name), stacklevel=2)
        return by_number


def shared_outside(module: nn.Module, known: Mapping[int, int] | None = None) -> set[int]:
    """Return the addresses of a module's memory that tensors outside of it share.

    Args:
        module: whose parameters and buffers have the memory.
        known: the number of tensors outside of it, by address, that do not count.
    """
    users = Counter(known or {})
    tensors: dict[int, torch.Tensor] = {}
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        users[_address(tensor)] += 1
        tensors[_address(tensor)] = tensor
    return {
        address
        for address, tensor in tensors.items()
        if address and memory_users(tensor) > users[address]
    }


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _memory(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        place = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
    return _address(tensor), *place
