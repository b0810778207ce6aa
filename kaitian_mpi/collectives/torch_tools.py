"""What torch's own tools, the compiler and the counter of collectives, need of the backend."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

ClassType = TypeVar("ClassType", bound=type)

_COMM_MODE = "torch.distributed.tensor.debug._comm_mode"
# c10d's operators by the process group's methods, where they are not called the same.
_OPERATORS = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
}


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


def count_for_debugging(method: str) -> None:
    """Let torch's `CommDebugMode`, where it is active, count a call of a process group's method.

    It counts operators of c10d that pass torch's dispatcher. A process group in Python is called
    directly.
    """
    if torch._C._len_torch_dispatch_stack() == 0 or _COMM_MODE not in sys.modules:
        return
    counter = sys.modules[_COMM_MODE].CommDebugMode
    operator = getattr(torch.ops.c10d, _OPERATORS.get(method, f"{method}_"), None)
    if operator is None:
        return
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counter):
            mode.__torch_dispatch__(_Counted(operator), ())


class _Counted:
    """Stands for an operator that is carried out elsewhere."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        self._overloadpacket = operator

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __str__(self) -> str:
        return str(self._overloadpacket)
