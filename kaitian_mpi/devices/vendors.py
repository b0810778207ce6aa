"""Devices of NVIDIA and AMD by `torch.cuda`, Intel by `torch.xpu`, Apple by `torch.mps`, others.

Sources: PyTorch's `NCCLUtils.hpp` (dtypes), `ProcessGroupNCCL.cpp` (reductions, futures); its
documentation, "HIP (ROCm) semantics".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch

from kaitian_mpi.devices.accelerator import Accelerator, EventMark

REDUCED = frozenset(
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
"""The dtypes that NCCL, and libraries with its interface, reduce."""
BYTES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
"""Dtypes that NCCL moves as bytes, but does not reduce in every release of torch."""
REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})
_ALLOCATOR_OPTIONS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_SET_ALLOCATOR_OPTIONS = (
    "_accelerator_setAllocatorSettings",  # since torch 2.9
    "_cuda_cudaCachingAllocator_set_allocator_settings",
)
_NVIDIA = "0x10de"  # PCI vendor
_DISPLAY = "0x03"  # PCI device class


class LikeCuda(Accelerator):
    """A device whose library has NCCL's interface, and whose streams torch handles as CUDA's."""

    pins_memory = True
    futures_handle_streams = True
    moved = reduced = REDUCED
    reductions = REDUCTIONS
    refused = frozenset({("AVG", torch.bool)})


class CudaDevice(LikeCuda):
    """An NVIDIA GPU; its collective library is NCCL."""

    kind = torch_type = "cuda"
    vendor_backend = "nccl"
    library = "NCCL"
    run_on_hardware = "NVIDIA H200, 2026-11-26"
    moved = REDUCED | BYTES
    reductions = REDUCTIONS | {"PREMUL_SUM"}
    refused = LikeCuda.refused | {
        ("PREMUL_SUM", t) for t in REDUCED - {torch.float64, torch.float32, torch.float16}
    }

    def grow_segments(self) -> None:
        if torch.version.hip is not None or any(map(os.environ.get, _ALLOCATOR_OPTIONS)):
            return
        names = (
            "_accelerator_setAllocatorSettings",
            "_cuda_cudaCachingAllocator_set_allocator_settings",
        )
        setters = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
        for set_options in setters[:1]:  # the first is that of torch since 2.9
            set_options("expandable_segments:True")

    def _may_have_devices(self, module: Any) -> bool:
        """Return True: `is_available` initializes the driver even in a rank that uses the CPU."""
        return True

    def _why_none(self) -> str:
        # The usual build of torch for Linux is CUDA's, also on hosts without a GPU.
        if not is_on_pci(_NVIDIA, _DISPLAY):
            return ""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f"CUDA_VISIBLE_DEVICES is {listed}; " if listed else ""
        return (
            f"it cannot open the host's NVIDIA GPU ({shown}nvidia-smi shows whether the driver is "
            f"new enough for CUDA {torch.version.cuda}; CUDA_VISIBLE_DEVICES=-1 hides the GPU)"
        )


class RocmDevice(CudaDevice):
    """An AMD GPU; its collective library is RCCL, which cannot join a group of NCCL's."""

    kind = "rocm"
    library = "RCCL"
    run_on_hardware = ""
    lists_devices = "rocminfo"

    @property
    def visibility(self) -> tuple[str, ...]:
        """The variables of ROCm's documentation, "GPU isolation techniques"."""
        return "ROCR_VISIBLE_DEVICES", *super().visibility

    def _why_none(self) -> str:
        return Accelerator._why_none(self)


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
    moved = REDUCED | {torch.int16}
    reduced = REDUCED - {torch.float64, torch.uint8, torch.bool}  # on every generation of devices
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


class MpsDevice(Accelerator):
    """The GPU of an Apple processor, with one stream that all threads share, and no float64.

    Sources: PyTorch's `torch/mps/__init__.py`, `event.py`, `ATen/native/mps/operations/Copy.mm`.
    """

    kind = torch_type = "mps"

    def count(self) -> int:
        return int(torch.backends.mps.is_available())

    def select(self, index: int) -> None:
        return

    def synchronize(self, index: int) -> None:
        torch.mps.synchronize()

    def name(self, index: int) -> str:
        return "Apple GPU"  # torch does not know the processor's

    def physical_id(self, index: int) -> str:
        return "mps"

    def memory_bytes(self, index: int) -> int:
        return int(torch.mps.recommended_max_memory())  # what Metal recommends to use at most

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        used = int(torch.mps.driver_allocated_memory())
        free = min(self.memory_bytes(index) - used, int(psutil.virtual_memory().available))
        return used + max(0, free) // sharers

    def restart_memory_peak(self, index: int) -> None:
        """Do nothing: torch caches all memory that it has used, so the peak only grows."""

    def memory_peak_bytes(self, index: int) -> int:
        return int(torch.mps.driver_allocated_memory())

    def streams(self) -> None:
        """Return None: the one stream is in order, and a blocking copy to the host waits for it."""

    def mark(self) -> EventMark:
        return EventMark(torch.mps.event.Event(enable_timing=True))

    def random_state(self, index: int) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state)


def is_on_pci(vendor: str, device_class: str, bus: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether Linux lists a PCI device of a vendor, such as `0x10de`, and class."""
    for device in bus.glob("*"):
        try:
            device_vendor = (device / "vendor").read_text().strip()
            actual_class = (device / "class").read_text()
        except OSError:
            continue
        if device_vendor == vendor and actual_class.startswith(device_class):
            return True
    return False
