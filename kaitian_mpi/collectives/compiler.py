"""Keeping `torch.compile` away from the backend."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, TypeVar

ClassType = TypeVar("ClassType", bound=type)


def not_compiled(target: ClassType) -> ClassType:
    """Let `torch.compile` neither compile nor trace a class's methods, and what they call.

    Dynamo looks at each Python frame that compiled code calls eagerly, and fails at the process
    group, which it knows as an opaque object: other backends are C++ and have no frames. The usual
    `torch.compiler.disable` would import the compiler, and costs microseconds in each call.
    """
    for value in vars(target).values():
        for function in _functions_of(value):
            _leave_alone(function)
    return target


def _functions_of(value: Any) -> Iterable[types.FunctionType]:
    found = (value.fget, value.fset) if isinstance(value, property) else (value,)
    return [function for function in found if isinstance(function, types.FunctionType)]


def _leave_alone(function: types.FunctionType) -> None:
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a collective is not compiled"  # type: ignore[attr-defined]
