"""Huawei Ascend devices: the plug-in torch_npu, and HCCL.

Sources: Ascend/pytorch's `torch_npu/_init/registry/distributed.py` (the backend `hccl`),
`torch_npu/csrc/distributed/ProcessGroupHCCL.cpp` and `HCCLUtils.cpp` (dtypes, reductions, futures),
`torch_npu/npu/__init__.py` and `memory.py`; the CANN documentation's "HcclAllReduce" and
"HcclReduce" (what HCCL reduces).
"""

from __future__ import annotations

from typing import Any

import torch

from kaitian_mpi.devices.accelerator import Accelerator
from kaitian_mpi.devices.visibility import VISIBILITY

# Those that HCCL reduces on every generation of devices, besides bfloat16.
_FLOATING = frozenset({torch.float32, torch.float16, torch.bfloat16})
_REDUCED = _FLOATING | {torch.int64, torch.int32, torch.int8}
_MOVED = _REDUCED | {torch.float64, torch.int16, torch.uint8, torch.bool}


class NpuDevice(Accelerator):
    """An Ascend NPU; its collective library is HCCL."""

    kind = "npu"
    torch_type = "npu"
    plugin = "torch_npu"
    vendor_backend = "hccl"
    vendor_lacks = frozenset({"gather"})
    library = "HCCL"
    visibility = VISIBILITY["npu"]
    pins_memory = True
    futures_handle_streams = True

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether HCCL supports this dtype; other dtypes go through host memory."""
        if reduction is None:
            return dtype in _MOVED
        if reduction == "AVG":  # torch_npu sums, then divides in place
            return dtype in _FLOATING
        if reduction == "PRODUCT" and dtype is torch.bfloat16:
            return False
        return dtype in _REDUCED and reduction in ("SUM", "PRODUCT", "MIN", "MAX")

    def abort_vendor_group(self, group: Any) -> None:
        """Call torch_npu's own method; the one that it inherits from torch does nothing."""
        group.abort_hccl_comm("the group is not used any more")
