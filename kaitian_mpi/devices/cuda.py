"""NVIDIA devices: torch's own module `torch.cuda`, and NCCL. AMD devices: the same, and RCCL.

Sources: PyTorch's `NCCLUtils.hpp` (dtypes), `ProcessGroupNCCL.cpp` (reductions, futures); its
documentation, "HIP (ROCm) semantics".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from kaitian_mpi.devices.accelerator import Accelerator

REDUCED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
"""The dtypes that NCCL, and libraries with its interface, reduce."""
BYTES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
"""Those that NCCL moves as bytes, but does not reduce in every release of torch."""
REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})
_PCI_VENDOR = "0x10de"
_PCI_DISPLAY = "0x03"  # the class of display controllers


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
    moved = REDUCED | BYTES
    reductions = REDUCTIONS | {"PREMUL_SUM"}
    refused = LikeCuda.refused | {
        ("PREMUL_SUM", t) for t in REDUCED - {torch.float64, torch.float32, torch.float16}
    }

    def _may_have_devices(self, module: Any) -> bool:
        """Return True: `is_available` initializes the driver even in a rank that uses the CPU."""
        return True

    def _why_none(self) -> str:
        # The usual build of torch for Linux is CUDA's, also on hosts without a GPU.
        if not is_on_pci(_PCI_VENDOR, _PCI_DISPLAY):
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
    lists_devices = "rocminfo"

    @property
    def visibility(self) -> tuple[str, ...]:
        """The variables of ROCm's documentation, "GPU isolation techniques"."""
        return "ROCR_VISIBLE_DEVICES", *super().visibility

    def _why_none(self) -> str:
        return Accelerator._why_none(self)


def is_on_pci(vendor: str, device_class: str, bus: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether Linux lists a PCI device of a vendor, such as `0x10de`, and class."""
    for device in bus.glob("*"):
        try:
            found = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        if found[0] == vendor and found[1].startswith(device_class):
            return True
    return False
