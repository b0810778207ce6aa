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

GroupType = TypeVar("GroupType", bound=type)


def with_names_before_2_13(group: GroupType) -> GroupType:
    """Give a class of process groups the method names that torch before 2.13 calls."""
    for name, earlier in _NAMES_BEFORE_2_13.items():
        setattr(group, earlier, getattr(group, name))
    return group


def all_gather_single(library: Any, outputs: Any, inputs: Any, options: Any) -> list[Work]:
    """Start gathering each rank's `inputs[i]` into `outputs[i]`.

    Args:
        library: a vendor's own process group, such as a `ProcessGroupNCCL`.
        outputs: tensors.
        inputs: tensors.
        options: `AllgatherOptions`.
    """
    if hasattr(library, "all_gather_single_coalesced"):
        return [library.all_gather_single_coalesced(outputs, inputs, options)]
    # Before 2.14 Python does not see the coalesced call.
    pairs = zip(outputs, inputs, strict=True)
    return [library._allgather_base(output, tensor, options) for output, tensor in pairs]


def reduce_scatter_single(library: Any, outputs: Any, inputs: Any, options: Any) -> list[Work]:
    """Start reducing each of `inputs`, and scattering it to `outputs`; arguments as above."""
    if hasattr(library, "reduce_scatter_single_coalesced"):
        return [library.reduce_scatter_single_coalesced(outputs, inputs, options)]
    # Before 2.14 Python does not see the coalesced call.
    pairs = zip(outputs, inputs, strict=True)
    return [library._reduce_scatter_base(output, tensor, options) for output, tensor in pairs]


def all_to_all_single(library: Any, *arguments: Any) -> list[Work]:
    """Start exchanging parts: output, input, the splits of both, and `AllToAllOptions`."""
    if hasattr(library, "all_to_all_single"):
        return [library.all_to_all_single(*arguments)]
    return [library.alltoall_base(*arguments)]  # before 2.13


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
