"""Where torch's releases, from 2.8 on, differ in what they ask of a process group or offer.

Each name here says which release it is for, so that it can go with the support of that release.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

NO_BUFFERS_IN_FORWARD: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}  # before 2.13
)
"""What tells DDP to broadcast no buffers in a forward."""

_NAMES_BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
# Before 2.14 a library's class, such as ProcessGroupNCCL, shows Python no coalesced calls of these.
_PARTS_BEFORE_2_14 = {
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}

GroupType = TypeVar("GroupType", bound=type)


def with_names_before_2_13(group: GroupType) -> GroupType:
    """Give a class of process groups the method names that torch before 2.13 calls."""
    for name, earlier in _NAMES_BEFORE_2_13.items():
        setattr(group, earlier, getattr(group, name))
    return group


def call_library(library: Any, name: str, *arguments: Any) -> list[Work]:
    """Start one of torch's operations on a vendor library's own process group.

    Args:
        library: the process group, such as a `ProcessGroupNCCL`.
        name: the operation's name as of torch 2.14.
        arguments: what the operation takes; the options last.
    """
    if hasattr(library, name):
        return [getattr(library, name)(*arguments)]
    if name in _PARTS_BEFORE_2_14:
        part = getattr(library, _PARTS_BEFORE_2_14[name])
        outputs, inputs, options = arguments
        pairs = zip(outputs, inputs, strict=True)
        return [part(output, tensor, options) for output, tensor in pairs]
    return [getattr(library, _NAMES_BEFORE_2_13[name])(*arguments)]


class BackendQueries:
    """Answers what torch asks the backend below a process group; ours has none below it.

    torch 2.14 asks any group, in `batch_isend_irecv` for one; earlier releases mostly only groups
    of torch's own class. Without an answer that raises "No backend type associated with device".
    """

    supports_coalescing = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries out operations on tensors of a device: the group itself."""
        return self

    get_backend = _get_backend  # from 2.14, as users call it

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether tensors can be allocated in memory that is the library's own: no."""
        return False
