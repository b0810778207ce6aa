"""Parameters whose values are not here, or not yet: whatever uses one first brings them.

No module is wrapped and no use is foreseen. Such a parameter has a class of its own, whose
`__torch_function__` waits before any function of torch that needs the values, whoever calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

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
