"""Excludes the backend's own code from `torch.compile`."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, TypeVar

ClassType = TypeVar("ClassType", bound=type)


def not_compiled(target: ClassType) -> ClassType:
    """Exclude a class's methods, and what they call, from `torch.compile`: a class decorator.

    Dynamo inspects each Python frame that compiled code calls eagerly, and fails at the process
    group, which it treats as an opaque object: other backends are C++ and have no frames. The usual
    `torch.compiler.disable` would import the compiler, and costs microseconds per call.
    """
    for value in vars(target).values():
        for function in _functions_of(value):
            _exclude(function)
    return target


def _functions_of(value: Any) -> Iterable[types.FunctionType]:
    found = (value.fget, value.fset) if isinstance(value, property) else (value,)
    return [function for function in found if isinstance(function, types.FunctionType)]


def _exclude(function: types.FunctionType) -> None:
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a collective is not compiled"  # type: ignore[attr-defined]
