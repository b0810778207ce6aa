"""NVIDIA devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.devices.accelerator import Accelerator

# The dtypes that torch's ProcessGroupNCCL passes to NCCL, and the reductions that NCCL supports.
_TYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})
_SCALED = frozenset({torch.float64, torch.float32, torch.float16})  # by PREMUL_SUM


class CudaDevice(Accelerator):
    """An NVIDIA GPU; its collective library is NCCL."""

    kind = "cuda"
    torch_type = "cuda"
    vendor_backend = "nccl"
    pins_memory = True
    futures_handle_streams = True

    def count(self) -> int:
        """Return the number of visible GPUs; 0 if torch was built for another vendor.

        In torch's builds for AMD, AMD's devices have the same torch type.
        """
        # Not `is_available`, which initializes the CUDA driver even in a rank that uses the CPU.
        return torch.cuda.device_count() if torch.version.cuda else 0

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether NCCL supports this dtype; other dtypes go through host memory."""
        if reduction is None:
            return dtype in _TYPES
        if reduction == "PREMUL_SUM":
            return dtype in _SCALED
        if reduction == "AVG" and dtype is torch.bool:
            return False
        return dtype in _TYPES and reduction in _REDUCTIONS

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return torch's own process group over NCCL."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
