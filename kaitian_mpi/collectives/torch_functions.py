"""Functions of torch.distributed that are not the backend's, put in the place of torch's own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from kaitian_mpi.collectives import BACKEND


def replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Let every loaded module of torch.distributed that knows a function have another.

    `device_mesh`, for one, has its own reference to `new_group`.
    """
    for place, module in list(sys.modules.items()):
        if place.startswith("torch.distributed") and vars(module).get(old.__name__) is old:
            vars(module)[old.__name__] = new


def admit_to_monitored_barrier() -> None:
    """Let `torch.distributed.monitored_barrier` take our groups: torch refuses all but gloo's."""
    import torch.distributed as dist

    torchs = dist.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: Any = False
    ) -> Any:
        is_ours = dist.get_rank(group) >= 0 and dist.get_backend(group) == BACKEND
        if not is_ours:
            return torchs(group, timeout, wait_all_ranks)
        ours: Any = group or dist.group.WORLD
        return ours.monitored_barrier(timeout, wait_all_ranks)

    replace(torchs, monitored_barrier)
