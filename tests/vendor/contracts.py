"""What each vendor's torch backend promises, where the promises differ, as data for `fake_library`.

`KAITIAN_FAKE_LIBRARY=nccl|xccl|hccl|mccl` chooses one for a process; by default it is NCCL's, and
the suite's worlds take turns (see `conftest.py`).

The sources are the vendors' public code:

- NCCL: pytorch/pytorch, `torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`
- XCCL: intel/torch-xpu-ops, `src/xccl/ProcessGroupXCCL.cpp` and `xccl.h`
- HCCL: Ascend/pytorch (torch_npu), `torch_npu/csrc/distributed/ProcessGroupHCCL.cpp`
- MCCL: MooreThreads/torch_musa, `torch_musa/csrc/distributed/ProcessGroupMCCL.cpp`

Comments name the function there. In all four, a kernel waits for a rank that is gone as long as
nothing ends it, and `wait` only makes the current stream wait.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

VARIABLE = "KAITIAN_FAKE_LIBRARY"
GIVEN = os.environ.get(VARIABLE)
"""The library that whoever started the process has chosen, if any."""

COMMON = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
BYTES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One library's contract."""

    returns_work_always: bool
    """Whether a call with `asyncOp=False` runs on the library's stream and returns a work. Else its
    kernel runs on the caller's current stream, and it returns None, coalesced calls as well."""

    works_keep_tensors: bool
    """Whether tensors are protected until the work's `wait` alone. Else the allocator is told of
    the stream that uses them (`record_stream`)."""

    has_is_success: bool
    """Whether a work has `is_success`. Else that raises an error."""

    ended_by: str
    """The method that ends kernels; empty: none does, and `abort` does nothing."""

    shutdown_waits: bool
    """Whether `shutdown` waits for the kernels, without a limit. Else it does nothing."""

    destroys_together: bool = False
    """Whether `shutdown` of a communicator then waits for the same call by the host's other ranks,
    without a limit."""

    handling_variable: str = ""
    """The variable that keeps, if it is 0, the library's own thread from ending the process when a
    kernel takes longer than the timeout; empty: no thread does."""

    polls_store_variable: str = ""
    """The variable that keeps, if it is 0, a thread from asking the store; empty: none does. The
    threads end by `shutdown` or `abort`, and are waited for when the group is freed."""

    lacks: frozenset[str] = frozenset()
    """Collectives that raise an error."""

    moved: frozenset[torch.dtype] = COMMON
    reduced: frozenset[torch.dtype] = COMMON
    """The types that can be moved, and reduced."""

    reductions: frozenset[str] = REDUCTIONS

    refused: frozenset[tuple[str, torch.dtype]] = frozenset({("AVG", torch.bool)})
    """Reductions that raise an error for a type."""


CONTRACTS = {
    "nccl": Contract(
        # collective, collectiveCoalesced: `return asyncOp ? work : nullptr`
        returns_work_always=False,
        # collective: stashed_for_allocator_safety_; WorkNCCL::synchronizeStream: unstash
        works_keep_tensors=True,
        has_is_success=False,  # WorkNCCL::isSuccess: "deprecated"
        ended_by="abort",  # abort, abortComms
        # shutdown: finalize, waitReady(true), then destroy
        shutdown_waits=True,
        # NCCL's commDestroySync has a barrier of the host's ranks from 2.31.2 on (pytorch#194775,
        # and pytorch#194679 about the same one).
        destroys_together=True,
        # Watchdog::runLoop, WorkNCCL::handleException: SkipCleanUp by default
        handling_variable="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        # HeartbeatMonitor::runLoop; ~ProcessGroupNCCL joins it
        polls_store_variable="TORCH_NCCL_DUMP_ON_TIMEOUT",
        moved=COMMON | BYTES,  # getNcclDataType
        reductions=REDUCTIONS | {"PREMUL_SUM"},  # getNcclReduceOp
        refused=frozenset(
            {("AVG", torch.bool)}
            | {("PREMUL_SUM", each) for each in (*INTEGERS, torch.bool, torch.bfloat16)}
        ),
    ),
    "xccl": Contract(
        returns_work_always=False,  # collective, endCoalescing: `return asyncOp ? work : nullptr`
        works_keep_tensors=True,  # collective; WorkXCCL::synchronizeStream: unstash
        has_is_success=True,  # Work's own
        # ProcessGroupXCCL.hpp overrides neither abort nor shutdown of torch's Backend.
        ended_by="",
        shutdown_waits=False,
        moved=COMMON | BYTES,  # xccl.h
    ),
    "hccl": Contract(
        returns_work_always=True,  # collective, collectiveCoalesced: `return work`
        # collective: by default (ERASE_RECORD_STREAM of OptionsManager::GetMultiStreamMemoryReuse)
        # the stream is recorded, and WorkHCCL::synchronizeInternal takes that back.
        works_keep_tensors=True,
        has_is_success=True,  # WorkHCCL::isSuccess
        # Init.cpp: "abort_hccl_comm"; the class's own abort(reason) overrides nothing of Backend
        ended_by="abort_hccl_comm",
        shutdown_waits=True,  # shutdown: synchronizes its streams
        # Watchdog::runLoop: TearDown by default (OptionsManager)
        handling_variable="HCCL_ASYNC_ERROR_HANDLING",
        lacks=frozenset({"gather"}),  # gather: "does not support gather"
        moved=COMMON | {torch.int16},  # HCCLUtils.cpp
        # checkSupportedDataType, without int16, which early devices lack (CANN's HcclAllReduce)
        reduced=frozenset(
            {
                *(torch.float32, torch.float16, torch.bfloat16),
                *(torch.int64, torch.int32, torch.int8),
            }
        ),
        # allreduce: AVG sums, then divides in place; CANN's documentation of HcclAllReduce
        refused=frozenset({("AVG", each) for each in INTEGERS} | {("PRODUCT", torch.bfloat16)}),
    ),
    "mccl": Contract(
        returns_work_always=True,  # collective: `return work`
        # collective: recordStream, unless with asyncOp=False or TORCH_MCCL_AVOID_RECORD_STREAMS
        works_keep_tensors=False,
        has_is_success=False,  # WorkMCCL::isSuccess: "deprecated"
        ended_by="abort",  # abort, abortComms
        shutdown_waits=True,  # shutdown: finalize, waitReady(true), then destroy
        # mcclCommWatchdog: SkipCleanUp by default
        handling_variable="TORCH_MCCL_ASYNC_ERROR_HANDLING",
    ),
}
"""By the name of torch's backend."""


def chosen_name() -> str:
    """Return the name of the library that this process has now."""
    return os.environ.get(VARIABLE, "nccl")


def choose(name: str) -> None:
    """Use another library from now on, unless whoever started the process has chosen one."""
    os.environ[VARIABLE] = GIVEN or name
