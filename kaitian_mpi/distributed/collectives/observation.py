"""Makes collectives visible to torch's profiler and its `CommDebugMode`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._distributed_c10d import Work
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kaitian_mpi.distributed.collectives.work import Queued

_COMM_MODE = "torch.distributed.tensor.debug._comm_mode"


def is_observed() -> bool:
    """Return whether one of these tools may be active."""
    return _profiler_enabled() or _len_torch_dispatch_stack() > 0


def observed(name: str, operator: str, start: Callable[[], Work]) -> Work:
    """Start a collective so that the tools see it; return its work.

    Profiles show `name`, and `CommDebugMode` counts `operator`, a name in `torch.ops.c10d`.
    """
    _count(operator)
    if not _profiler_enabled():
        return start()
    with profile_record(name) as record:
        work = start()
        if isinstance(work, Queued):
            work.end_with(record)
    return work


def profile_record(name: str) -> record_function:
    """Return a context manager that profiles show as an operation of the backend."""
    return record_function(f"kaitian:{name}")


def _count(operator: str) -> None:
    """Count an operator in `CommDebugMode`, which counts those that torch's dispatcher sees.

    A process group in Python is called directly.
    """
    if _COMM_MODE not in sys.modules:
        return
    counter = sys.modules[_COMM_MODE].CommDebugMode
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counter):
            mode.__torch_dispatch__(_Counted(getattr(torch.ops.c10d, operator)), ())


class _Counted:
    """A stand-in for an operator that is executed elsewhere."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        self._overloadpacket = operator

    def __call__(self, *_: Any, **__: Any) -> None:
        pass

    def __str__(self) -> str:
        return str(self._overloadpacket)
