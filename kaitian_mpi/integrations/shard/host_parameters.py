"""Parameters that stay in host memory when a script moves its model to a device.

A device that is too small for a model could not even start to train it: trainers move the whole
model before DistributedDataParallel divides it. So large parameters stay on the host until they
have owners. They look as if they were on the device, and are copied there while something computes
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kaitian_mpi.devices import device_of
from kaitian_mpi.integrations.shard.local_rows import put_rows
from kaitian_mpi.integrations.shard.remote_reads import RowValues
from kaitian_mpi.integrations.shard.script_parameters import (
    ScriptParameter,
    ScriptParameters,
    is_sharded,
)
from kaitian_mpi.train.layouts.shard.memory_budget import is_worth_sharding
from kaitian_mpi.train.layouts.shard.row_states import count_rows


class HostParameters(ScriptParameters):
    """The large parameters of a module that was moved to a device."""

    def __init__(self, module: nn.Module, numbers: Collection[int], device: torch.device) -> None:
        """Let some parameters of a module look as if they were on a device. Not collective."""
        self._changes = dict.fromkeys(numbers, 0)
        super().__init__(module, numbers, device, self._copy_whole, self._version, self._keep)
        # By `data`: a change of a detached tensor would count as one of the parameter.
        self._values = {number: self._parameters[number].data for number in numbers}
        for number in numbers:
            self._reshard(number)

    def values_of(self, parameter: ScriptParameter) -> torch.Tensor:
        """Return the values of one of these parameters, in host memory."""
        self.free()
        return self._values[self._number_of[parameter]]

    def missing_bytes(self, parameter: ScriptParameter) -> int:
        """Return the bytes that the values of one of these parameters do not take on the device."""
        value = self._values.get(self._number_of[parameter])
        return parameter.nbytes if value is None or value.device != self._device else 0

    def release(self, parameters: Collection[nn.Parameter]) -> None:
        """Let some of these parameters be plain ones again."""
        self.free()
        for number, parameter in self._parameters.items():
            if self._holds(number) and any(parameter is other for other in parameters):
                if number in self._values:
                    with torch._C.DisableTorchFunctionSubclass():
                        self._set(number, self._values.pop(number))
                parameter.__class__ = nn.Parameter

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow `Module.to` and its like; a change of the dtype changes the values."""
        self.free()
        for number, parameter in self._parameters.items():
            if not self._holds(number):
                continue
            like = change(torch.empty(0, dtype=parameter.dtype, device=self._device))
            value = self._values.get(number)
            if value is not None:
                self._values[number] = change(value).to(value.device)
            self._device = like.device
            with torch._C.DisableTorchFunctionSubclass():
                self._set(number, like.new_empty(1).expand(parameter.shape))
            self._reshard(number)

    def _holds(self, number: int) -> bool:
        """Return whether a parameter has neither become a plain one since, nor another's."""
        kind = type(self._parameters[number])
        return issubclass(kind, ScriptParameter) and kind.holder is self

    def _copy_whole(self, number: int, values: torch.Tensor) -> None:
        put_rows(self._whole(number), values)

    def _whole(self, number: int) -> Sequence[RowValues]:
        if not self._holds(number):  # by a `state_dict` of before
            return _rows(self._parameters[number].detach())
        return _rows(self._values[number])

    def _version(self, number: int) -> Any:
        return self._changes[number] if self._holds(number) else object()

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
    """Yield a module's parameters that are no plain ones yet, with their names and holders."""
    for name, parameter in module.named_parameters():
        if is_sharded(parameter) and isinstance(type(parameter).holder, HostParameters):
            yield name, parameter, type(parameter).holder  # type: ignore[misc]


def as_plain(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with what a plan needs to know of it: it may be a plain one later."""
    if not is_sharded(parameter):
        return parameter
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, requires_grad=parameter.requires_grad)


def _rows(values: torch.Tensor) -> list[RowValues]:
    return [RowValues(0, count_rows(values), values)]
