"""What each vendor's torch backend promises, where the promises differ, as data for `fake_library`.

The sources are the vendors' public code: PyTorch's `torch/csrc/distributed/c10d/`
`ProcessGroupNCCL.cpp` and `NCCLUtils.cpp`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "KAITIAN_FAKE_LIBRARY"
"""The environment variable that chooses one of `CONTRACTS` for this process."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One library's contract."""

    returns_work_always: bool
    """Whether a call with `asyncOp=False` runs on the library's stream and returns a work. Else its
    kernel runs on the caller's current stream, and it returns None, coalesced calls as well."""

    works_keep_tensors: bool
    """Whether a work keeps the tensors until its `wait`. Else the allocator is told of the stream
    that uses them (`record_stream`)."""

    has_is_success: bool
    """Whether a work has `is_success`. Else that raises an error."""

    shutdown_waits: bool
    """Whether `shutdown` waits for the kernels, without a limit."""


CONTRACTS = {
    "nccl": Contract(
        # ProcessGroupNCCL::collective, collectiveCoalesced: `return asyncOp ? work : nullptr`
        returns_work_always=False,
        # ProcessGroupNCCL::collective, WorkNCCL::synchronizeStream: stashed_for_allocator_safety_
        works_keep_tensors=True,
        # ProcessGroupNCCL::WorkNCCL::isSuccess: deprecated, raises
        has_is_success=False,
        # ProcessGroupNCCL::shutdown: finalize() and waitReady(true); only abort() ends kernels
        shutdown_waits=True,
    ),
}
"""By the name of torch's backend."""


def chosen_contract() -> Contract:
    """Return the contract that this process's library keeps."""
    return CONTRACTS[os.environ.get(VARIABLE, "nccl")]
