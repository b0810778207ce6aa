"""Parameters whose new values are still on their way: whatever uses one first waits for them.

No module is wrapped and no use is foreseen. Such a parameter has a class of its own, whose
`__torch_function__` waits before any function of torch that needs the values, whoever calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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

    arrive: Callable[[nn.Parameter], None]
    """Makes the parameter a plain one again, with its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_about(func):
            for each in late_in((args, kwargs)):
                type(each).arrive(each)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).arrive(self)
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


def is_compiling() -> bool:
    """Return whether torch.compile is in use: compiled code would not wait."""
    module = sys.modules.get("torch._dynamo.eval_frame")  # which optimizers import as well
    if module is None:
        return False
    backends: dict[int, Any] | None = getattr(module, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())
