"""Adapts a process group to torch's releases, from 2.8 on, and to its compiler.

Each name or comment states the release it is for, so that it can be removed with that release's
support.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

# The names that torch has had since 2.13, and the earlier ones.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_from: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _call_coalesced(
    name: str, single: str, options: Any, library: Any, outputs: Any, inputs: Any
) -> list[Work]:
    """Call a vendor's process group for all tensors at once or, before 2.14, for each by itself."""
    if hasattr(library, name):
        return [getattr(library, name)(outputs, inputs, options)]
    call = getattr(library, single)
    pairs = zip(outputs, inputs, strict=True)
    return [call(output, tensor, options) for output, tensor in pairs]


all_gather_single = partial(_call_coalesced, "all_gather_single_coalesced", "_allgather_base")
reduce_scatter_single = partial(
    _call_coalesced, "reduce_scatter_single_coalesced", "_reduce_scatter_base"
)


def all_to_all_single(
    splits: tuple[list[int], list[int]], options: Any, library: Any, outputs: Any, inputs: Any
) -> list[Work]:
    """Start an all-to-all of one tensor into another; `splits` are those of both."""
    call = getattr(library, "all_to_all_single", None) or library.alltoall_base  # before 2.13
    return [call(*outputs, *inputs, *splits, options)]


class BackendQueries:
    """The queries that torch sends to a process group's backend; our group has no separate backend.

    torch 2.14 sends them for any group, e.g. in `batch_isend_irecv`; earlier releases mostly only
    for groups of torch's own class. Without them, torch raises "No backend type associated with
    device".
    """

    supports_coalescing = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for tensors of a device: the group itself."""
        return self

    get_backend = _get_backend  # the public name since 2.14

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors cannot be allocated in the library's own memory."""
        return False


Target = TypeVar("Target", bound=Callable[..., Any])


def not_compiled(target: Target) -> Target:
    """Exclude a function, or a class's methods, and what they call from `torch.compile`.

    Dynamo inspects each Python frame that compiled code calls eagerly, and fails at the process
    group, which it treats as an opaque object: other backends are C++ and have no frames. The usual
    `torch.compiler.disable` would import the compiler, and costs microseconds per call.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for value in vars(target).values() if isinstance(target, type) else (target,):
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(function, types.FunctionType):
                strategy = eval_frame._FrameExecStrategy(skip, skip)
                eval_frame.set_code_exec_strategy(function.__code__, strategy)
                disabled: Any = function
                disabled._torchdynamo_disable = True
                disabled._torchdynamo_disable_msg = "a collective is not compiled"
    return target
