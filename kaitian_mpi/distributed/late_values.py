"""Parameters whose values are not here, or not yet: whatever uses one first brings them.

No module is wrapped and no use is foreseen. Such a parameter has a class of its own, whose
`__torch_function__` waits before any function of torch that needs the values, whoever calls it.
If a parameter is in parts on the ranks, it is whole only while something computes with it: what
autograd would save of the values is replaced by a note, with which backward brings them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from kaitian_mpi.errors import UserError

_STAND_IN_STD = 0.02

# What is called of a parameter, and needs its shape, dtype or gradient only.
_OF_VALUES = "data", "T", "mT", "H", "mH", "real", "imag"
_READING = {getattr(torch.Tensor, name).__get__ for name in _OF_VALUES}
_READING.add(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
_ABOUT = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "__len__", "__hash__", "requires_grad_", "register_hook"),
    *("register_post_accumulate_grad_hook", "get_device", "storage_offset", "retain_grad"),
}


class Late(nn.Parameter):
    """A parameter whose values may not be used before `arrive`, which a subclass sets."""

    arrive: Callable[[Sequence[nn.Parameter]], None]
    """Makes parameters plain ones again, with their values: all that one function uses."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_about(func):
            used = [*late_in((args, kwargs))]
            for kind in dict.fromkeys(type(each) for each in used):
                kind.arrive([each for each in used if type(each) is kind])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).arrive([self])
        return self.__deepcopy__(memo)  # of the plain one


def is_about(function: Any) -> bool:
    """Return whether a function of torch needs no values of a tensor."""
    name = getattr(function, "__name__", "")
    return name in _ABOUT or (name in ("__get__", "__set__") and function not in _READING)


def late_in(value: Any) -> Iterator[Late]:
    """Yield those among the arguments of a function."""
    if isinstance(value, Late):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from late_in(each)
    elif isinstance(value, dict):
        yield from late_in([*value.values()])


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was called for a module."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def is_compiling() -> bool:
    """Return whether compiled code is in use, which would not wait."""
    module = sys.modules.get("torch._dynamo.eval_frame")  # which optimizers import as well
    if module is None:
        return False
    backends: dict[int, Any] | None = getattr(module, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


Source = Callable[[int], torch.Tensor]
"""Returns the whole values of the parameter of this number, in memory of their own."""


class _Note(NamedTuple):
    """What autograd keeps in the place of some values of a parameter."""

    number: int
    size: torch.Size
    stride: Sequence[Any]
    offset: Any


class PartedModel:
    """A model of which some parameters are away until they are used.

    Between `begin` and `end` a use brings the values from a source; at other times it raises a
    `UserError`. The parameters stay the objects that they were, with their gradients and hooks.

    Attributes:
        numbers: of the parameters that are in parts, in the order of the model's `parameters()`.
    """

    def __init__(self, model: nn.Module, numbers: Collection[int], device: torch.device) -> None:
        """Take nothing away yet; they are to be used on `device`.

        Raises:
            UserError: the model is compiled.
        """
        if any(is_compiled(module) for module in model.modules()):
            raise UserError(
                "--layout shard: the model does not fit whole on each rank, and its parameters "
                "cannot be in parts with torch.compile; leave that out"
            )
        parameters = list(model.named_parameters())
        self.numbers, self._model = frozenset(numbers), model
        self._parameters = {number: parameters[number][1] for number in numbers}
        self._number_of = {parameters[number][1]: number for number in numbers}
        self._away = type("Away", (Late,), {"arrive": self._bring_used})
        self._names = {number: parameters[number][0] for number in numbers}
        self._device = device
        self._here: dict[int, torch.Tensor] = {}  # those used last
        self._by_memory: dict[int, int] = {}
        self._source: Source | None = None
        self._hooks: Any = None

    def keep(self, rows: Collection[tuple[int, int, int]]) -> dict[Any, torch.Tensor]:
        """Take all parameters away, and bring the others to the device.

        Returns:
            These rows on the device, by the number of a parameter, begin and end.
        """
        kept: dict[Any, torch.Tensor] = {}
        wanted = {number: [key for key in rows if key[0] == number] for number in self.numbers}
        for number, parameter in self._parameters.items():
            for key in wanted[number]:
                kept[key] = parameter.detach()[key[1] : key[2]].to(self._device, copy=True)
            self._leave(number)
        with torch._C.DisableTorchFunctionSubclass():
            self._model.to(self._device)
        return kept

    def place(self, number: int, values: torch.Tensor) -> nn.Parameter:
        """Return what an optimizer steps for some rows of a parameter, on the device."""
        needs_gradient = self._parameters[number].requires_grad
        return nn.Parameter(values.to(self._device), requires_grad=needs_gradient)

    def begin(self, source: Source) -> None:
        """Bring parameters from `source` when they are used, until `end`; in this thread."""
        if self._source is None:
            self._source = source
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def end(self) -> None:
        """Take all parameters away again. Does nothing if there was no `begin`."""
        if self._source is not None:
            self._source, hooks, self._hooks = None, self._hooks, None
            hooks.__exit__()
            for number in [*self._here]:
                self._leave(number)

    def bring(self, numbers: Sequence[int]) -> None:
        """Make parameters whole, and take others away."""
        if self._source is None:
            raise UserError(
                f"the parameter {self._names[numbers[0]]} is in parts on the ranks (layout shard), "
                "and whole only while a step or an evaluation computes with it; read the weights "
                "from a checkpoint, or from checkpoints/model.pt when the run is finished"
            )
        for number in dict.fromkeys(numbers):
            if number in self._here:
                continue
            for other in [each for each in self._here if each not in numbers]:
                self._leave(other)
            values = self._source(number)
            self._here[number] = values
            self._by_memory[values.untyped_storage().data_ptr()] = number
            parameter = self._parameters[number]
            with torch._C.DisableTorchFunctionSubclass():
                parameter.data = values
            parameter.__class__ = nn.Parameter

    def _bring_used(self, parameters: Sequence[nn.Parameter]) -> None:
        self.bring([self._number_of[parameter] for parameter in parameters])

    def stand_ins(self) -> Source:
        """Return a source of any values, without communication, to measure what a step takes."""
        largest = max(each.numel() for each in self._parameters.values())
        memory: dict[torch.dtype, torch.Tensor] = {}

        def source(number: int) -> torch.Tensor:
            parameter = self._parameters[number]
            if parameter.dtype not in memory:
                made = torch.empty(largest, dtype=parameter.dtype, device=self._device)
                memory[parameter.dtype] = made.normal_(std=_STAND_IN_STD)
            return memory[parameter.dtype][: parameter.numel()].view(parameter.shape)

        return source

    def room_for(self, number: int) -> torch.Tensor:
        """Return new memory for a whole parameter, on the device."""
        parameter = self._parameters[number]
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)

    def name(self, number: int) -> str:
        return self._names[number]

    def _leave(self, number: int) -> None:
        """Take a parameter away; what still refers to its values keeps them."""
        parameter, values = self._parameters[number], self._here.pop(number, None)
        if values is not None:
            self._by_memory.pop(values.untyped_storage().data_ptr(), None)
        with torch._C.DisableTorchFunctionSubclass():
            nothing = torch.full((1,), torch.nan, dtype=parameter.dtype, device=self._device)
            parameter.data = nothing.expand(parameter.shape)
        parameter.__class__ = self._away

    def _pack(self, tensor: torch.Tensor) -> Any:
        number = self._by_memory.get(tensor.untyped_storage().data_ptr())
        if number is None or tensor.dtype != self._here[number].dtype:
            return tensor
        return _Note(number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Note):
            return saved  # type: ignore[no-any-return]
        self.bring([saved.number])
        return self._here[saved.number].as_strided(saved.size, saved.stride, saved.offset)


def can_be_parted(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be in parts: rows of a real, contiguous one."""
    is_plain = type(parameter) is nn.Parameter and parameter.is_contiguous()
    return is_plain and parameter.dim() > 0 and parameter.is_floating_point()
