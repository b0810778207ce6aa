"""Parameters that stay in host memory when a script moves its model to a device.

A device that is too small for a model could not even start to train it: trainers move the whole
model before DistributedDataParallel divides it. So large parameters stay on the host until they
have owners. They look as if they were on the device, and are copied there while something computes
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from kaitian_mpi.devices import device_of
from kaitian_mpi.integrations.shard.owned_rows import Piece
from kaitian_mpi.integrations.shard.script_parameters import (
    ScriptParameter,
    ScriptParameters,
    is_sharded,
)
from kaitian_mpi.train.layouts.shard.memory_budget import is_worth_sharding
from kaitian_mpi.train.layouts.shard.shards import count_rows


class HostParameters(ScriptParameters):
    """The large parameters of a module that was moved to a device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Let the large parameters of a module, which are on the host, look as if on the device."""
        numbers = [
            number for number, parameter in enumerate(module.parameters()) if stays(parameter)
        ]
        self._changes = dict.fromkeys(numbers, 0)
        super().__init__(
            *(module, numbers, device), *(self._whole, self._changes.__getitem__, self._keep)
        )
        self._values = {number: self._parameters[number].detach() for number in numbers}
        for number in numbers:
            self._reshard(number)

    def values_of(self, parameter: ScriptParameter) -> torch.Tensor:
        """Return the values of one of these parameters, in host memory."""
        self.free()
        return self._values[self._number_of[parameter]]

    def release(self, parameters: Collection[nn.Parameter]) -> None:
        """Let some of these parameters be plain ones on the host again."""
        self.free()
        for number, parameter in self._parameters.items():
            if number in self._values and any(parameter is other for other in parameters):
                with torch._C.DisableTorchFunctionSubclass():
                    self._set(number, self._values.pop(number))
                parameter.__class__ = nn.Parameter

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow `Module.to` and its like; a change of the dtype changes the values."""
        self.free()
        self._values = {number: change(value).cpu() for number, value in self._values.items()}
        for number, value in self._values.items():
            self._device = change(torch.empty(0, dtype=value.dtype, device=self._device)).device
            self._reshard(number)

    def _whole(self, number: int) -> list[Piece]:
        value = self._values[number]
        return [(0, count_rows(value), value)]

    @torch.no_grad()
    def _keep(self, number: int, values: torch.Tensor) -> None:
        self._values[number].copy_(values)
        self._changes[number] += 1


def is_large(parameter: nn.Parameter) -> bool:
    """Return whether a parameter stays on the host if its model may not fit a rank's device."""
    return is_sharded(parameter) or is_worth_sharding(parameter)


def stays(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one that stays on the host."""
    is_on_host = not is_sharded(parameter) and device_of(parameter.device).is_host
    return is_on_host and is_large(parameter)


def on_host(module: nn.Module) -> Iterator[tuple[str, ScriptParameter, HostParameters]]:
    """Yield a module's parameters that have stayed on the host, with their names and holders."""
    for name, parameter in module.named_parameters():
        if is_sharded(parameter) and isinstance(type(parameter).holder, HostParameters):
            yield name, parameter, type(parameter).holder  # type: ignore[misc]
