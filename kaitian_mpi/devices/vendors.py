"""Devices of Huawei, Cambricon and Moore Threads, by plug-ins of torch; of Intel, by torch."""

from __future__ import annotations

from typing import Any

import torch

from kaitian_mpi.devices.cuda import BYTES, REDUCED, REDUCTIONS, LikeCuda

# Those that HCCL reduces on every generation of devices.
_REDUCED_BY_HCCL = frozenset(
    {
        *(torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8),
    }
)


class NpuDevice(LikeCuda):
    """An Ascend NPU: the plug-in torch_npu, and HCCL.

    Sources: Ascend/pytorch's `ProcessGroupHCCL.cpp`, `HCCLUtils.cpp`, `registry/distributed.py`;
    CANN's documentation, "HcclAllReduce" (what HCCL reduces).
    """

    kind = torch_type = "npu"
    plugin = "torch_npu"
    vendor_backend = "hccl"
    library = "HCCL"
    vendor_lacks = frozenset({"gather"})
    moved = _REDUCED_BY_HCCL | {torch.float64, torch.int16, torch.uint8, torch.bool}
    reduced = _REDUCED_BY_HCCL
    refused = frozenset(  # torch_npu averages by dividing the sum in place
        {("PRODUCT", torch.bfloat16)}
        | {("AVG", dtype) for dtype in (torch.int64, torch.int32, torch.int8)}
    )

    def abort_vendor_group(self, group: Any) -> None:
        """Call torch_npu's own method; the one that it inherits from torch does nothing."""
        group.abort_hccl_comm("the group is not used any more")


class MluDevice(LikeCuda):
    """A Cambricon MLU: the plug-in torch_mlu, and CNCL.

    Sources: Cambricon/torch_mlu's `process_group_cncl.cpp`, `torch_mlu/mlu/cncl.py`, `device.py`.
    """

    kind = torch_type = "mlu"
    plugin = "torch_mlu"
    vendor_backend = "cncl"
    library = "CNCL"
    moved = reduced = REDUCED - {torch.float64}  # which it would pass on as float32
    reductions = REDUCTIONS - {"AVG"}


class MusaDevice(LikeCuda):
    """A Moore Threads GPU: the plug-in torch_musa, and MCCL.

    Sources: MooreThreads/torch_musa's `ProcessGroupMCCL.cpp`, `Register.cpp`, `core/device.py`.
    """

    kind = torch_type = "musa"
    plugin = "torch_musa"
    vendor_backend = "mccl"
    library = "MCCL"


class XpuDevice(LikeCuda):
    """An Intel GPU, or a tile of it: `torch.xpu`, and XCCL, torch's name for oneCCL there.

    Sources: intel/torch-xpu-ops' `ProcessGroupXCCL.cpp`; PyTorch's `torch/xpu/__init__.py`.
    """

    kind = torch_type = "xpu"
    vendor_backend = "xccl"
    library = "XCCL"
    moved = REDUCED | BYTES
    lists_devices = "sycl-ls"
