"""NVIDIA devices."""

from __future__ import annotations

import torch

# As torch's ProcessGroupNCCL has them: types that it hands to NCCL, and what NCCL does with them.
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


class CudaDevice:
    """An NVIDIA GPU; its kind's collectives are NCCL's."""

    kind = "cuda"
    vendor_backend = "nccl"

    def vendor_takes(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether NCCL moves or reduces this type; the rest goes through host memory."""
        if reduction is None:
            return dtype in _TYPES
        if reduction == "PREMUL_SUM":
            return dtype in _SCALED
        if reduction == "AVG" and dtype is torch.bool:
            return False
        return dtype in _TYPES and reduction in _REDUCTIONS

    def count(self) -> int:
        """Return the number of visible GPUs; 0 where torch was built for another vendor."""
        return torch.cuda.device_count() if torch.version.cuda else 0

    def torch_device(self, index: int) -> torch.device:
        """Return `cuda:index`."""
        return torch.device("cuda", index)

    def select(self, index: int) -> None:
        """Make this GPU the current one."""
        torch.cuda.set_device(index)

    def synchronize(self, index: int) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize(index)

    def name(self, index: int) -> str:
        """Return the GPU's name."""
        return torch.cuda.get_device_name(index)

    def memory_bytes(self, index: int) -> int:
        """Return the GPU's memory in bytes."""
        return int(torch.cuda.get_device_properties(index).total_memory)

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        """Return what this process holds already, and its part of what is free."""
        free, _ = torch.cuda.mem_get_info(index)
        return torch.cuda.memory_reserved(index) + free // sharers

    def restart_memory_peak(self, index: int) -> None:
        """Let torch's allocator begin anew."""
        torch.cuda.reset_peak_memory_stats(index)

    def memory_peak_bytes(self, index: int) -> int:
        """Return the allocator's peak."""
        return torch.cuda.max_memory_reserved(index)
