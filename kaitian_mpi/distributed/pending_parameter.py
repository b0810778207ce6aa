"""A parameter whose values are not on this rank, or not yet: whatever uses it first waits for them.

No module is wrapped, and no use is foreseen. Such a parameter has a class of its own, whose
`__torch_function__` brings the values before any function of torch that needs them, whoever calls
it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

# Properties that need a parameter's values; all others need its shape, dtype or gradient only.
_VALUE_PROPERTIES = "data", "T", "mT", "H", "mH", "real", "imag"
_READS_VALUES = {getattr(torch.Tensor, name).__get__ for name in _VALUE_PROPERTIES}
SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_READS_VALUES.add(SETS_DATA)
# Functions that return a tensor filled with one number, in the shape of another tensor.
_FILL_FUNCTIONS = torch.zeros_like, torch.ones_like, torch.full_like
# Their result may be used to change the values without autograd's knowledge.
EXPOSES_MEMORY = torch.Tensor.data.__get__, torch.Tensor.data_ptr, torch.Tensor.untyped_storage  # type: ignore[attr-defined]
# Methods that need the shape, dtype or gradient only.
_NEED_NO_VALUES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "__len__", "__hash__", "requires_grad_", "register_hook"),
    *("register_post_accumulate_grad_hook", "get_device", "storage_offset", "retain_grad"),
}

GOES_FIRST = "goes_first"
"""An attribute of other classes of tensors whose values are not in their memory.

Their `__torch_function__` calls the function again with tensors that have the values.
"""


class PendingParameter(nn.Parameter):
    """A parameter whose values may not be used before `materialize`, which a subclass sets."""

    materialize: Callable[[Sequence[PendingParameter], Any], None]
    """Gives values to all parameters of one class that a function uses; called with both."""
    fills_no_memory: ClassVar[bool] = False
    """Whether `zeros_like` and its like return an expanded tensor of one element."""

    def __init_subclass__(cls) -> None:
        _wait_in_transforms()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, GOES_FIRST) for kind in types):
            return NotImplemented
        if cls.fills_no_memory and func in _FILL_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0].as_strided((1,), (1,)), *args[1:], **kwargs).expand_as(args[0])
        if not needs_no_values(func):
            used = pending_in((args, kwargs))
            with outside_transforms():
                for kind in dict.fromkeys(type(parameter) for parameter in used):
                    kind.materialize([p for p in used if type(p) is kind], func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).materialize([self], copy.deepcopy)
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
            setattr(transforms, name, _after_materializing(function))


def _after_materializing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(tensor: torch.Tensor, *arguments: Any) -> Any:
        if isinstance(tensor, PendingParameter):
            with outside_transforms():
                type(tensor).materialize([tensor], function)
        return function(tensor, *arguments)

    return call


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context outside of torch.func's transforms, which forbid to change memory."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def needs_no_values(function: Any) -> bool:
    """Return whether a function of torch needs a tensor's shape, dtype or gradient only."""
    name = getattr(function, "__name__", "")
    return name in _NEED_NO_VALUES or (
        name in ("__get__", "__set__") and function not in _READS_VALUES
    )


def pending_in(arguments: Any) -> list[PendingParameter]:
    """Return the pending parameters among a function's arguments."""
    pending: list[PendingParameter] = []
    _find_pending(arguments, pending)
    return pending


def _find_pending(value: Any, pending: list[PendingParameter]) -> None:
    kind = type(value)
    # torch's parameters answer `isinstance` in Python, which takes longer than a small function.
    if PendingParameter in kind.__mro__:
        pending.append(value)
    elif issubclass(kind, list | tuple):
        for element in value:
            _find_pending(element, pending)
    elif issubclass(kind, dict):
        for element in value.values():
            _find_pending(element, pending)


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
    """Return the number of tensors that share a tensor's memory, itself included."""
    storage = tensor.untyped_storage()  # one more user, until it is deleted
    return torch._C._storage_Use_Count(storage._cdata) - 1
