"""Parameters whose values are not here, or not yet: whatever uses one first brings them.

No module is wrapped and no use is foreseen. Such a parameter has a class of its own, whose
`__torch_function__` waits before any function of torch that needs the values, whoever calls it.
If a parameter is in parts on the ranks, it is whole only while something computes with it: what
autograd would save of the values is replaced by a note, with which backward brings them again.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import ends_of_streams, keep_for_current_stream
from kaitian_mpi.errors import UserError

_STAND_IN_STD = 0.02

# What is called of a parameter, and needs its shape, dtype or gradient only.
_OF_VALUES = "data", "T", "mT", "H", "mH", "real", "imag"
_READING = {getattr(torch.Tensor, name).__get__ for name in _OF_VALUES}
_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_READING.add(_SETS_DATA)
# What makes a tensor of one number in the shape of another.
_FILLED = torch.zeros_like, torch.ones_like, torch.full_like
# What is returned may change the values, and autograd does not know.
_GIVES_MEMORY = torch.Tensor.data.__get__, torch.Tensor.data_ptr, torch.Tensor.untyped_storage  # type: ignore[attr-defined]
_ABOUT = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "__len__", "__hash__", "requires_grad_", "register_hook"),
    *("register_post_accumulate_grad_hook", "get_device", "storage_offset", "retain_grad"),
}


class Late(nn.Parameter):
    """A parameter whose values may not be used before `arrive`, which a subclass sets."""

    arrive: Callable[[Sequence[Late], Any], None]
    """Gives parameters their values: all those of a class that this function uses."""
    fills_no_memory: ClassVar[bool] = False
    """Whether tensors of one number in a parameter's shape have the memory of that number."""

    def __init_subclass__(cls) -> None:
        _wait_in_transforms()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if cls.fills_no_memory and func in _FILLED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0].as_strided((1,), (1,)), *args[1:], **kwargs).expand_as(args[0])
        if not is_about(func):
            used = [*late_in((args, kwargs))]
            with outside_transforms():
                for kind in dict.fromkeys(type(each) for each in used):
                    kind.arrive([each for each in used if type(each) is kind], func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).arrive([self], copy.deepcopy)
        if id(self) not in memo:
            values = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        return memo[id(self)]


def _wait_in_transforms() -> None:
    """Let transforms of torch.func wait for their arguments, which no function of torch sees."""
    for module, name in (("eager_transforms", "_wrap_for_grad"), ("vmap", "_add_batch_dim")):
        transforms = sys.modules.get(f"torch._functorch.{module}")
        function = getattr(transforms, name, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            setattr(transforms, name, _after_arrival(function))


def _after_arrival(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(tensor: torch.Tensor, *arguments: Any) -> Any:
        if isinstance(tensor, Late):
            with outside_transforms():
                type(tensor).arrive([tensor], function)
        return function(tensor, *arguments)

    return call


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context that no transform of torch.func sees: it forbids to change memory."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


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


def memory_users(tensor: torch.Tensor) -> int:
    """Return how many tensors have a tensor's memory, itself among them."""
    storage = tensor.untyped_storage()  # which has it, too
    return torch._C._storage_Use_Count(storage._cdata) - 1


Source = Callable[[int], torch.Tensor]
"""Returns the whole values of the parameter of this number, in memory of their own."""

Keep = Callable[[int, torch.Tensor], None]
"""Takes back the whole values of a parameter, which a forward may have changed in place."""


class _Note(NamedTuple):
    """What autograd keeps in the place of some values of a parameter, or of their cast."""

    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: Sequence[Any]
    offset: Any


class _Arrived:
    """A parameter's values, which any stream may use: it waits for the one that has brought them.

    The memory is not used again before all of these streams are done with it.

    Attributes:
        values: for what needs no more than their shape and dtype.
    """

    def __init__(self, values: torch.Tensor) -> None:
        """Note that the current stream has brought these values."""
        self.values = values
        self._module: Any = device_of(values.device).streams()
        self._streams = self._current()
        self._ends = ends_of_streams([values])

    def on_current_stream(self) -> torch.Tensor:
        """Return the values for the current stream."""
        current = self._current()
        if not current <= self._streams:
            for end in self._ends:
                end.let_current_stream_wait()
            keep_for_current_stream(self.values)
            self._streams |= current
        return self.values

    def changed(self) -> torch.Tensor:
        """Return the values for the current stream as all streams leave them."""
        for stream in self._streams - self._current():
            self._module.current_stream(self.values.device).wait_event(stream.record_event())
        return self.on_current_stream()

    def _current(self) -> set[Any]:
        if self._module is None:
            return set()
        return {self._module.current_stream(self.values.device)}


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
                "--layout shard: the model does not fit whole on each rank, and torch.compile does "
                "not support sharded parameters; remove it"
            )
        parameters = list(model.named_parameters())
        self.numbers = frozenset(numbers)
        self._model = model
        self._parameters = {number: parameters[number][1] for number in numbers}
        self._number_of = {parameters[number][1]: number for number in numbers}
        self._away: type[Late] = type("Away", (Late,), {"arrive": self._bring_used})
        self._names = {number: parameters[number][0] for number in numbers}
        self._device = device
        self._here: dict[int, _Arrived] = {}  # those used last
        self._versions: dict[int, int] = {}  # of these; -1 if the values may change unseen
        self._memory: dict[int, int] = {}  # its address, of each
        self._by_memory: dict[int, int] = {}
        self._source: Source | None = None
        self._keep: Keep | None = None
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

    def begin(self, source: Source, keep: Keep | None = None) -> None:
        """Bring parameters from `source` when they are used, until `end`; in this thread.

        Values that have changed since are given to `keep`.
        """
        if self._source is None:
            self._source = source
            self._keep = keep
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def end(self, keeps: bool = True) -> None:
        """Take all parameters away again. Does nothing if there was no `begin`.

        If not `keeps`, what has changed of those that are here is dropped.
        """
        if self._source is not None:
            self._source = None
            hooks = self._hooks
            self._hooks = None
            hooks.__exit__()
            keep = self._keep if keeps else None
            self._keep = None
            left = [(number, self._leave(number)) for number in [*self._here]]
            for number, changed in left:
                if keep is not None and changed is not None:
                    keep(number, changed)

    def bring(self, numbers: Sequence[int]) -> None:
        """Make parameters whole, and take others away."""
        if self._source is None and self._away.fills_no_memory:
            raise UserError(
                "--layout shard: the task's optimizer uses the values of "
                f"{self._names[numbers[0]]} when it is made, but the model does not fit whole on "
                "each rank; use another optimizer, or more memory"
            )
        if self._source is None:
            raise UserError(
                f"the parameter {self._names[numbers[0]]} is in parts on the ranks (layout shard), "
                "and whole only while a step or an evaluation computes with it; read the weights "
                "from a checkpoint, or from checkpoints/model.pt when the run is finished"
            )
        for number in dict.fromkeys(numbers):
            if number in self._here:
                self._here[number].on_current_stream()
                continue
            for other in [each for each in self._here if each not in numbers]:
                changed = self._leave(other)
                if self._keep is not None and changed is not None:
                    self._keep(other, changed)
            values = self._source(number)
            self._here[number] = _Arrived(values)
            with torch._C.DisableTorchFunctionSubclass():
                self._set(number, values)
                self._versions[number] = self._parameters[number]._version

    def _bring_used(self, parameters: Sequence[Late], function: Any) -> None:
        """Make whole what a function uses, of which none may leave before it is called."""
        numbers = [self._number_of[parameter] for parameter in parameters]
        if function == _SETS_DATA and self._source is not None:
            raise UserError(
                f"--layout shard: {self._names[numbers[0]]}.data was set by a forward, while the "
                "parameter is in parts; change it in place, as by copy_() with torch.no_grad(), or "
                "use devices on which the model fits whole"
            )
        self.bring(numbers)
        if function in _GIVES_MEMORY:
            self._versions |= dict.fromkeys(numbers, -1)

    @contextmanager
    def making_optimizers(self) -> Iterator[None]:
        """Let optimizers make their state in the block, as Adagrad does: it takes no memory yet."""
        self._away.fills_no_memory = True
        try:
            yield
        finally:
            self._away.fills_no_memory = False

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

    def stream(self) -> Any:
        """Return the device's current stream; None if it has none."""
        module = device_of(self._device).streams()
        return None if module is None else module.current_stream(self._device)

    def name(self, number: int) -> str:
        return self._names[number]

    def _set(self, number: int, values: torch.Tensor) -> None:
        """Let a parameter have these values, by whose memory `_pack` knows it."""
        if self._by_memory.get(before := self._memory.get(number, 0)) == number:
            del self._by_memory[before]
        self._parameters[number].data = values
        self._memory[number] = values.untyped_storage().data_ptr()
        self._by_memory[self._memory[number]] = number

    def _leave(self, number: int) -> torch.Tensor | None:
        """Take a parameter away; what still refers to its values keeps them.

        Returns:
            The values, if they may have changed.
        """
        parameter, arrived = self._parameters[number], self._here.pop(number, None)
        with torch._C.DisableTorchFunctionSubclass():
            is_changed = self._versions.pop(number, None) != parameter._version
            nothing = torch.full((1,), torch.nan, dtype=parameter.dtype, device=self._device)
            self._set(number, nothing.expand(parameter.shape))
        parameter.__class__ = self._away
        torch.clear_autocast_cache()  # which would keep a cast of each
        return arrived.changed() if is_changed and arrived is not None else None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # which has no memory itself
            return tensor
        number = self._by_memory.get(tensor.untyped_storage().data_ptr())
        if number is not None and tensor.dtype != self._parameters[number].dtype:
            return tensor
        strides, offset = tensor.stride(), tensor.storage_offset()
        if number is None:
            number = self._number_of_cast(tensor)
        elif number not in self._here:  # a function of autograd's has saved it, and used another
            strides = torch.empty(tensor.size(), device="meta").stride()
        if number is None:
            return tensor
        return _Note(number, tensor.dtype, tensor.size(), strides, offset)

    def _number_of_cast(self, tensor: torch.Tensor) -> int | None:
        """Return of which parameter this has the values in another dtype, as autocast makes them.

        They are compared: an activation may be as large. A device is waited for, as it is by the
        exchange of the values themselves.
        """
        for number, arrived in self._here.items():
            values = arrived.values
            size = values.numel() * tensor.element_size()
            is_cast = tensor.is_floating_point() and tensor.dtype != values.dtype
            if is_cast and tensor.untyped_storage().nbytes() == size:
                values = arrived.on_current_stream()
                flat = tensor.as_strided((values.numel(),), (1,), 0)
                if torch.equal(flat, values.view(-1).to(tensor.dtype)):
                    return number
        return None

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Note):
            return saved  # type: ignore[no-any-return]
        self.bring([saved.number])
        values = self._here[saved.number].on_current_stream().to(saved.dtype)
        return values.as_strided(saved.size, saved.stride, saved.offset)


def check_without_torch_func(model: nn.Module, error: RuntimeError) -> None:
    """Check that a forward has not failed because the model's parameters are in parts.

    Raises:
        UserError: it uses a gradient of torch.func's, which cannot be while autograd keeps notes.
    """
    are_away = any(isinstance(parameter, Late) for parameter in model.parameters())
    if are_away and "saved tensor hooks" in str(error):
        raise UserError(
            "--layout shard: the loss uses a gradient of torch.func, which is not possible while "
            "parameters are in parts; use torch.autograd.grad, or devices on which the model fits "
            "whole"
        ) from error


def can_be_parted(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be in parts: rows of a real, contiguous one."""
    is_plain = type(parameter) is nn.Parameter and parameter.is_contiguous()
    return is_plain and parameter.dim() > 0 and parameter.is_floating_point()
